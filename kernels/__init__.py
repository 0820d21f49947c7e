"""Kernels: the op table of the network and its providers.

>>> ops = select("cpu")
>>> ops.choices["linear"]
'reference'
"""

from .contracts.base import OpError, Prepared
from .ops import OP_NAMES, Ops
from .registry import Provider, TableRow, providers, register, select, table, unregister

__all__ = [
    "OP_NAMES",
    "OpError",
    "Ops",
    "Prepared",
    "Provider",
    "TableRow",
    "providers",
    "register",
    "select",
    "table",
    "unregister",
]
