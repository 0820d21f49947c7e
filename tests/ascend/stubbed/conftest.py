"""Tier E: the real torch_npu over a stub runtime. Collected only where it is installed (``make test-ascend``)."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("torch_npu") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch_npu  # noqa: F401  registers torch.npu and its ops
