"""Every op of the provider against the real torch_npu's names, schemas and shape functions: called on ``meta`` with the
shapes and dtypes of the released model, compared with the contract; then on the stub device, where all must raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer_plugin.kernels import OP_NAMES, Ops, ascend
from deepinfer_plugin.kernels.ascend import experts, vendor

from ...kernels.cases import BUILDERS, Weights, make
from .. import documented

BF16, F32, I64, I32, U8, BOOL = (torch.bfloat16, torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool)
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu

# The released V4.1-Flash. PAGES is small: a meta tensor has no memory, but a pool has at least its pages.
H, M, HEADS, D, Q_RANK, INDEX_HEADS, INDEX_D = 5120, 4, 64, 512, 1280, 32, 128
EXPERTS, TOPK, INNER, VOCAB, RANK, WINDOW, RING = 384, 6, 2304, 129280, 256, 128, 134
PAGES, GROUPS, TABLE, SLOTS, SELECTED, BATCH = 4096, 64, 64, 65, 512, 8
ROWS = [1, 6, 48, 512]


def t(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def ids(rows: int) -> Tensor:
    return t(rows, dtype=I64)


@pytest.fixture(scope="module")
def ops() -> Ops:
    """On meta. The cast of a layout has no shape function in torch_npu; it keeps what it is given."""
    original = experts.op

    def op(name: str) -> Callable[..., Any]:
        return (lambda x, *_, **__: x) if name == "npu_format_cast" else original(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "op", op)
        yield Ops(torch.device("meta"), dict.fromkeys(OP_NAMES, "ascend"), {"ascend": ascend.OPS})


def fp8(n: int, k: int) -> tuple[Tensor, Tensor]:
    return t(n, k, dtype=E4M3), t(-(-n // 32), k // 32, dtype=E8M0)


def attention(r: int, compressed: bool, draft: bool) -> tuple[Any, ...]:
    pages = (t(PAGES, GROUPS, D // 2, dtype=U8), t(PAGES, GROUPS, D // 16, dtype=U8), t(BATCH, TABLE, dtype=I64))
    pages += (ids(r), t(r, SELECTED, dtype=I64))
    return (
        t(r, HEADS, D),
        t(r, D + D // 32, dtype=U8),
        *(ids(r) for _ in range(4)),
        t(SLOTS, RING, D + D // 32, dtype=U8),
        WINDOW,
        *(pages if compressed else (None,) * 5),
        t(HEADS, dtype=F32),
        D**-0.5,
        ids(r) if draft else None,
    )


# name -> rows -> (op, arguments given the table, results as (shape, dtype)); no results: the op writes in place.
CASES: dict[str, Callable[[Ops, int], tuple[str, tuple[Any, ...], list[tuple[tuple[int, ...], torch.dtype]]]]] = {
    f"linear {n}x{k}": lambda o, r, n=n, k=k: ("linear", (t(r, k), o.prepare_linear(*fp8(n, k))), [((r, n), BF16)])
    for n, k in ((Q_RANK, H), (HEADS * D, Q_RANK), (D, H), (H, 8192), (INNER, H), (H, INNER), (5 * H, 6144))
}
CASES |= {
    "dense bf16": lambda o, r: (
        "dense",
        (t(r, H), o.prepare_dense(t(INDEX_HEADS, H)), None),
        [((r, INDEX_HEADS), BF16)],
    ),
    "dense float32": lambda o, r: ("dense", (t(r, H), o.prepare_dense(t(D, H)), F32), [((r, D), F32)]),
    "dense head": lambda o, r: ("dense", (t(r, H), o.prepare_dense(t(VOCAB, H)), F32), [((r, VOCAB), F32)]),
    "grouped bf16": lambda o, r: (
        "grouped_linear",
        (t(r, 8, 4096), o.prepare_grouped(*fp8(8192, 4096), 8), False),
        [((r, 8192), BF16)],
    ),
    "grouped fp8": lambda o, r: (
        "grouped_linear",
        (t(r, 8, 4096), o.prepare_grouped(*fp8(8192, 4096), 8), True),
        [((r, 8192), BF16)],
    ),
    "rms_norm": lambda o, r: ("rms_norm", (t(r, H), t(H), 1e-20), [((r, H), BF16)]),
    "rope": lambda o, r: ("rope", (t(r, HEADS, D), ids(r), t(32, dtype=F32), False), [((r, HEADS, D), BF16)]),
    "hc_mix": lambda o, r: (
        "hc_mix",
        (t(r, M, H), t(24, M * H, dtype=F32), t(24, dtype=F32), t(3, dtype=F32), 1e-20, 1e-6, 20),
        [((r, M), F32), ((r, M), F32), ((r, M, M), F32)],
    ),
    "hc_collapse": lambda o, r: ("hc_collapse", (t(r, M, H), t(r, M, dtype=F32)), [((r, H), BF16)]),
    "hc_expand": lambda o, r: (
        "hc_expand",
        (t(r, H), t(r, M, H), t(r, M, dtype=F32), t(r, M, M, dtype=F32)),
        [((r, M, H), BF16)],
    ),
    "window_pack": lambda o, r: ("window_pack", (t(r, D),), [((r, D + D // 32), U8)]),
    "window_write": lambda o, r: (
        "window_write",
        (
            t(r, 528, dtype=U8),
            ids(r),
            ids(r),
            t(r, dtype=BOOL),
            t(SLOTS, RING, 528, dtype=U8),
            t(SLOTS, RING, dtype=I32),
        ),
        [],
    ),
    "compress_pair": lambda o, r: (
        "compress_pair",
        (t(r, D, dtype=F32), t(r, D, dtype=F32), *(ids(r) for _ in range(3)), t(SLOTS, 7, 2, D, dtype=F32), BF16),
        [((r, D), BF16)],
    ),
    "tail_write": lambda o, r: (
        "tail_write",
        (
            t(r, D, dtype=F32),
            t(r, D, dtype=F32),
            ids(r),
            ids(r),
            t(r, dtype=BOOL),
            t(SLOTS, 7, 2, D, dtype=F32),
        ),
        [],
    ),
    "latent_write": lambda o, r: (
        "latent_write",
        (
            t(r, D),
            t(PAGES, GROUPS, D // 2, dtype=U8),
            t(PAGES, GROUPS, D // 16, dtype=U8),
            ids(r),
            ids(r),
            t(r, dtype=BOOL),
        ),
        [],
    ),
    "index_key_write": lambda o, r: (
        "index_key_write",
        (
            t(r, INDEX_D),
            t(PAGES, GROUPS, INDEX_D // 2, dtype=U8),
            t(PAGES, GROUPS, INDEX_D // 32, dtype=U8),
            ids(r),
            ids(r),
            t(r, dtype=BOOL),
        ),
        [],
    ),
    "ngram_write": lambda o, r: (
        "ngram_write",
        (ids(r), ids(r), ids(r), t(r, dtype=BOOL), t(SLOTS, 9, dtype=I64)),
        [],
    ),
    "index_scores": lambda o, r: (
        "index_scores",
        (
            t(r, INDEX_HEADS, INDEX_D),
            t(r, INDEX_HEADS),
            t(PAGES, GROUPS, INDEX_D // 2, dtype=U8),
            t(PAGES, GROUPS, INDEX_D // 32, dtype=U8),
            t(BATCH, TABLE, dtype=I64),
            ids(r),
            ids(r),
            True,
        ),
        [((r, TABLE * GROUPS), BF16)],
    ),
    "index_scores many requests": lambda o, r: (
        "index_scores",
        (
            t(r, INDEX_HEADS, INDEX_D),
            t(r, INDEX_HEADS),
            t(PAGES, GROUPS, INDEX_D // 2, dtype=U8),
            t(PAGES, GROUPS, INDEX_D // 32, dtype=U8),
            t(64, TABLE, dtype=I64),
            ids(r),
            ids(r),
            False,
        ),
        [((r, TABLE * GROUPS), BF16)],
    ),
    "candidate_blocks": lambda o, r: (
        "candidate_blocks",
        (t(r, TABLE * GROUPS), ids(r), 8, 2048),
        [((r, TABLE * GROUPS), BOOL)],
    ),
    "top_groups": lambda o, r: (
        "top_groups",
        (t(r, TABLE * GROUPS), ids(r), SELECTED, t(r, TABLE * GROUPS, dtype=BOOL)),
        [((r, SELECTED), I64)],
    ),
    "attention window": lambda o, r: ("sparse_attention", attention(r, False, False), [((r, HEADS, D), BF16)]),
    "attention selected": lambda o, r: ("sparse_attention", attention(r, True, False), [((r, HEADS, D), BF16)]),
    "attention draft": lambda o, r: ("sparse_attention", attention(r, False, True), [((r, HEADS, D), BF16)]),
    "moe_gate": lambda o, r: (
        "moe_gate",
        (
            t(r, H),
            o.prepare_dense(t(EXPERTS, H)),
            t(EXPERTS, dtype=F32),
            t(EXPERTS, dtype=F32),
            t(r, dtype=BOOL),
            TOPK,
            1.5,
        ),
        [((r, TOPK), F32), ((r, TOPK), I64)],
    ),
    "moe_gate draft": lambda o, r: (
        "moe_gate",
        (t(r, H), o.prepare_dense(t(128, H)), t(128, dtype=F32), None, None, 3, 1.5),
        [((r, 3), F32), ((r, 3), I64)],
    ),
    "assign_slots": lambda o, r: (
        "assign_slots",
        (t(r, TOPK, dtype=I64), t(EXPERTS, dtype=I64), t(16, dtype=I32), t(16, 8, dtype=I32), (EXPERTS + 16) // 8, 0),
        [((r, TOPK), I64), ((EXPERTS,), I64)],
    ),
    "swiglu": lambda o, r: ("swiglu", (t(r, INNER), t(r, INNER), 10.0, t(r, dtype=F32)), [((r, INNER), BF16)]),
    "moe_experts": lambda o, r: (
        "moe_experts",
        (
            t(r, H),
            t(r, TOPK, dtype=F32),
            t(r, TOPK, dtype=I64),
            o.prepare_experts(
                t(48, 2 * INNER, H // 2, dtype=U8),
                t(48, 2 * INNER, H // 32, dtype=E8M0),
                t(48, H, INNER // 2, dtype=U8),
                t(48, H, INNER // 32, dtype=E8M0),
            ),
            10.0,
        ),
        [((r, H), F32)],
    ),
    "engram_hash": lambda o, r: (
        "engram_hash",
        (*(ids(r) for _ in range(4)), t(SLOTS, 9, dtype=I64), ids(4), t(3, 8, dtype=I64), ids(24), 7),
        [((r, 24), I64)],
    ),
    "engram_gather": lambda o, r: (
        "engram_gather",
        (t(r, 24, dtype=I64), t(1 << 20, 256, dtype=E4M3), t(1 << 20, 8, dtype=E8M0), BF16),
        [((r, 6144), BF16)],
    ),
    "engram_gate": lambda o, r: (
        "engram_gate",
        (t(r, M, H), t(r, 5 * H), t(M, H), t(M, H), 1e-20, t(r, dtype=BOOL)),
        [((r, M, H), BF16)],
    ),
    "markov": lambda o, r: (
        "markov",
        (ids(r), t(VOCAB, RANK), o.prepare_dense(t(VOCAB, RANK))),
        [((r, VOCAB), F32), ((r, RANK), BF16)],
    ),
    "confidence": lambda o, r: ("confidence", (t(r, H), t(r, RANK), t(1, H + RANK)), [((r,), F32)]),
}


def call(ops: Ops, name: str, rows: int) -> tuple[Any, list[tuple[tuple[int, ...], torch.dtype]]]:
    op, arguments, expected = CASES[name](ops, rows)
    result = getattr(ops, op)(*arguments)
    results = () if result is None else result if isinstance(result, tuple) else (result,)
    return [(tuple(each.shape), each.dtype) for each in results], expected


def test_every_op_is_called(ops):
    assert {CASES[name](ops, 1)[0] for name in CASES} == set(OP_NAMES)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", CASES)
def test_shapes_and_dtypes(ops, name, rows):
    got, expected = call(ops, name, rows)
    assert got == expected


# ---- negative controls: the shape functions do refuse --------------------------------------------------------------


def quant_matmul(**changed: Any) -> Tensor:
    x, scale = vendor.op("npu_dynamic_mx_quant")(t(8, H), dst_type=E4M3, scale_alg=1)
    arguments = {
        "x1": x,
        "x2": t(Q_RANK, H, dtype=E4M3).t(),
        "scale": t(Q_RANK, H // 64, 2, dtype=U8).transpose(0, 1),
        "scale_dtype": vendor.E8M0,
        "pertoken_scale": scale,
        "pertoken_scale_dtype": vendor.E8M0,
        "output_dtype": BF16,
        "group_sizes": [1, 1, 32],
    }
    return vendor.op("npu_quant_matmul")(**(arguments | changed))


def test_the_control_itself():
    assert quant_matmul().shape == (8, Q_RANK)


@pytest.mark.parametrize(
    "changed",
    [
        {"scale_dtype": E8M0},  # torch's own number of the type
        {"scale": t(Q_RANK, H // 128, 2, dtype=U8).transpose(0, 1)},
        {"x2": t(Q_RANK, H // 2, dtype=E4M3).t()},
        {"no_such_argument": 1},
    ],
    ids=["type code", "scales of half the channels", "another K", "argument name"],
)
def test_what_is_wrong_is_refused(changed):
    with pytest.raises((RuntimeError, TypeError)):
        quant_matmul(**changed)


def test_a_name_that_is_not_there_raises():
    with pytest.raises(AttributeError):
        _ = torch.ops.npu.npu_compress_pair


# ---- nothing falls back to the CPU ---------------------------------------------------------------------------------


def on_device(value: Any) -> Any:
    return torch.empty_like(value, device="npu") if isinstance(value, Tensor) else value


@pytest.mark.parametrize("name", BUILDERS)
def test_compute_raises_on_the_stub(name):
    """torch_npu hands an op it lacks to the CPU, with a warning and a result. Here every op raises instead."""
    table = Ops(torch.device("npu"), dict.fromkeys(OP_NAMES, "ascend"), {"ascend": ascend.OPS})
    case = make(name, BF16)
    with pytest.raises(RuntimeError, match="aclnn"):
        arguments = {}
        for key, value in case.args.items():
            if isinstance(value, Weights):
                value = getattr(table, value.prepare)(*map(on_device, value.args))
            arguments[key] = on_device(value)
        getattr(table, case.op)(**arguments)


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.name())
        return func(*args, **(kwargs or {}))


def has_kernel(name: str) -> bool:
    """Whether torch_npu has a kernel of its own for an aten op, or for the out variant that torch derives the op from,
    or the op is made of others, which are looked at too."""

    def registered(op: str, *keys: str) -> bool:
        return any(torch._C._dispatch_has_kernel_for_dispatch_key(op, key) for key in keys)

    if registered(name, "PrivateUse1", "CompositeExplicitAutograd", "CompositeImplicitAutograd"):
        return True
    base, _, overload = name.partition(".")
    out = f"{base}.{overload}_out" if overload else f"{base}.out"
    return registered(name, "CompositeExplicitAutogradNonFunctional") and registered(out, "PrivateUse1")


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "float32"])
@pytest.mark.parametrize("name", BUILDERS)
def test_every_plain_operation_has_an_npu_kernel(name, dtype):
    """What the ops are composed of, recorded on the CPU with the vendor's ops as documented."""
    case = make(name, dtype)
    table = Ops(torch.device("cpu"), dict.fromkeys(OP_NAMES, "ascend"), {"ascend": ascend.OPS})
    inside = Recorder()
    quiet = {name: hidden(inside, function) for name, function in documented.OPS.items()}
    with documented.installed(**quiet), inside:
        case.run(table)
    missing = {seen for seen in inside.seen if seen.startswith("aten::") and not has_kernel(seen)}
    assert inside.seen and not missing, f"torch_npu would hand {', '.join(sorted(missing))} to the CPU"


def hidden(mode: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    """The stand-in of a vendor op, with what it is made of left out of the record."""

    def run(*args: Any, **named: Any) -> Any:
        before = set(mode.seen)
        result = function(*args, **named)
        mode.seen = before
        return result

    return run


def test_the_recorder_sees_a_missing_kernel():
    assert not has_kernel("aten::igamma") and has_kernel("aten::add.Tensor")
