#!/usr/bin/env bash
# On a machine with an Ascend 950: pre-flight, the contract suite on the device, a tiny model end to end, timings.
# Writes ascend_report.json and ascend_report.txt into OUT (default: here). Without a device it says SKIPPED and why, and
# ends with 0. Run it from a checkout, in the environment that has torch_npu and SGLang.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m tests.ascend.hardware --out "${OUT:-.}" "$@"
