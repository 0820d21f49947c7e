"""The ascend provider: Ascend 950 (arch 3510). Never executed on that hardware so far (docs/ascend.md)."""
