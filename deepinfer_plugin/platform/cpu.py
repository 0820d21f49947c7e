"""A machine without an accelerator. SGLang's own CPU engine needs compiled kernels and AMX; this platform needs torch
alone."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from torch.profiler import ProfilerActivity


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Out of tree to SGLang, so that nothing keyed on its in-tree CPU identity fires. All capabilities off: no
    Triton, no graphs."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        """A name: the mixin's ``torch.device`` breaks argument resolution, which splits it like a string."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        """For models other than ours; ours declares its own."""
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Of the few functions SGLang compiles itself (a penalty, for one): as they are, because code generation needs
        a C++ compiler and a request must not end the server for want of one."""
        return "eager"

    def get_torch_profiler_activity_str(self) -> str:
        """Of what a platform adds to the profiler's activities: nothing, SGLang's own "CPU" is all there is. Without a
        name the scheduler dies of ``/start_profile``."""
        return "NONE"

    def get_torch_profiler_activity(self) -> ProfilerActivity:
        return ProfilerActivity.CPU

    def get_dispatch_key_name(self) -> str:
        return "native"
