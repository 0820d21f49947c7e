"""Float32 master weights inside the network, and the way back into a released checkpoint.

``to_masters`` turns every stored weight of a ``Network`` into the float32 parameter it dequantises to;
``network.prepare()`` then casts them on the fly, and ``export`` casts them once more, with the same functions, into
files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod, sqrt
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from training_ops import TrainingOps

from deepinfer_plugin.kernels.reference import formats
from deepinfer_plugin.model.checkpoint import INDEX, expected_tensors
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.engram import TableRows
from deepinfer_plugin.model.engram_table import EngramTable
from deepinfer_plugin.model.layers import FP8Weight, GroupedLinear
from deepinfer_plugin.model.moe import Experts, Gate
from deepinfer_plugin.model.network import Network
from deepinfer_plugin.model.profiles import profile_named
from deepinfer_plugin.model.weights import Checkpoint, load_into

SHARDS = 3
LAST_MIX = 2.0  # logit by which a stream prefers itself when the streams are mixed


def load_masters(
    path: Path, ops: TrainingOps, device: str | torch.device, weights: Path | None = None, profile: str = "model"
) -> Network:
    """The network of ``path/config.json`` and its tokenizer, on float32 masters, with the weights of the checkpoint in
    ``weights`` (None: ready for ``initialise``).
    """
    config = V41Config.load(path)
    table = EngramTable.load(path, config)
    network = Network(config, ops, profile_named(profile), table)  # type: ignore[arg-type]
    if weights is not None:
        load_into(network, Checkpoint.open(weights, config), progress=False)
    to_masters(network)
    return network.to(device)


def to_masters(network: Network) -> None:
    """Replace every parameter by a trainable float32 one. Biases of the gates stay without gradient: they follow the
    load.
    """
    for module in list(network.modules()):
        module.raw = ()  # type: ignore[assignment]  # it is laid out anew every step
        stored = dict(module.named_parameters(recurse=False))
        if isinstance(module, FP8Weight | GroupedLinear):
            values = {"weight": formats.fp8_weight_dequant(stored["weight"], stored["scale"])}
        elif isinstance(module, TableRows):
            values = {"weight": formats.fp8_dequant(stored["weight"], stored["scale"])}
        elif isinstance(module, Experts):
            values = {
                name: formats.mxfp4_dequant(stored[name], stored[scale])
                for name, scale in (("w13", "s13"), ("w2", "s2"))
            }
        else:
            values = {name: value.detach().float() for name, value in stored.items()}
        for name in stored:
            trained = name in values and not (isinstance(module, Gate) and name.startswith("bias"))
            setattr(module, name, nn.Parameter(values[name].clone(), requires_grad=trained) if name in values else None)


@torch.no_grad()
def initialise(network: Network, seed: int) -> None:
    """Sublayers that start small, streams that start apart, experts that start equally likely."""
    generator = torch.Generator().manual_seed(seed)
    config = network.config
    depth = 2 * config.num_layers

    def normal(parameter: Tensor, std: float) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    for name, parameter in network.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if name.endswith("norm.weight") or leaf in ("q_weight", "k_weight"):
            parameter.fill_(1)
        elif leaf in ("bias", "bias_vl") or leaf == "attn_sink":
            parameter.zero_()
        elif leaf.endswith("_scale"):
            parameter.fill_(0.1)
        elif leaf.endswith("_base"):
            streams = config.hc_mult
            normal(parameter, 0.5)
            parameter[2 * streams :] += LAST_MIX * torch.eye(streams, device=parameter.device).flatten()
        elif "embed" in name:
            normal(parameter, 0.02 if "engram" in name else 1.0)
        else:
            gain = 1 / sqrt(depth) if any(part in name for part in ("wo_b", "w2")) else 1.0
            normal(parameter, gain / sqrt(parameter.shape[-1]))


# ---- export ----------------------------------------------------------------------------------------------------------


def tensors(network: Network) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the released checkpoint in the order of its table."""
    for name, spec in expected_tensors(network.config).items():
        if name.endswith(".scale"):
            continue
        value = _master(network, name).detach()
        scale = name.removesuffix("weight") + "scale"
        if spec.dtype == torch.int8:
            packed, scales = formats.mxfp4_cast(value)
            yield from ((name, packed.view(torch.int8)), (scale, scales))
        elif spec.dtype == torch.float8_e4m3fn:
            cast = formats.fp8_cast if ".engram.embed." in name else formats.fp8_weight_cast
            yield from zip((name, scale), cast(value), strict=True)
        else:
            yield name, value.to(spec.dtype)


def _master(network: Network, name: str) -> Tensor:
    """The master that a checkpoint tensor is cast from; experts are slices of a stack."""
    path, leaf = name.rsplit(".", 1)
    if ".experts." not in path:
        return getattr(network.get_submodule(path), leaf)
    stack, expert, matrix = path.rsplit(".", 2)
    experts = network.get_submodule(stack)
    if matrix == "w2":
        return experts.w2[int(expert)]
    return experts.w13[int(expert)].chunk(2)[0 if matrix == "w1" else 1]


def export(network: Network, path: Path) -> int:
    """Write shards and index of the released format into ``path``. Returns the bytes of the tensors."""
    total = sum(prod(spec.shape) * spec.dtype.itemsize for spec in expected_tensors(network.config).values())
    path.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    number, filled = 1, 0
    for name, tensor in tensors(network):
        shard[name] = tensor.cpu().contiguous()
        filled += tensor.nbytes
        weight_map[name] = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        if filled >= total * number / SHARDS:
            save_file(shard, path / weight_map[name], metadata={"format": "pt"})
            shard, number = {}, number + 1
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return total
