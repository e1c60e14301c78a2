# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Puts the software Gaudi into PyTorch, once a process."""

import functools
import sys

import torch

from soft_gaudi import chip, device


@functools.cache
def install() -> None:
    """Makes the device hpu, torch.hpu, hccl and hpu_backend exist."""
    from soft_gaudi import collectives, compiling, padding

    torch._register_device_module("hpu", device.hpu_module(_install_device()))
    torch.accelerator.empty_host_cache = lambda: None  # EngineCore calls it at its end
    torch.Tensor.hpu = lambda self, *args, **kwargs: self.to("hpu")
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    padding.install()
    collectives.install()
    compiling.install()
    _hide_cpu_kernels()
    _define_torchvision_operators()


def _install_device() -> device.Memory:
    """The device in C++, or tensors on cpu where it cannot be built.

    Raises:
        RuntimeError: If it cannot, and SOFT_GAUDI_TENSORS=hpu asks for it.
    """
    from soft_gaudi import compiling, fold, native

    if chip.tensors() != "cpu":
        try:
            return native.load()
        except RuntimeError as error:
            if chip.tensors() == "hpu":
                raise
            print(
                f"software Gaudi: {error}; tensors for hpu lie on cpu, where no mix-up "
                f"of devices shows ({chip.TENSORS_ENV}=cpu asks for that)",
                file=sys.stderr,
            )
    fold.install()
    compiling.fold_fake_tensors()
    return device.Memory()


def _hide_cpu_kernels() -> None:
    """Makes the compiled kernels of a CPU wheel absent, as they are in a Gaudi wheel.

    The HPU platform would import the build for AVX-512 on any machine.
    """
    sys.modules["vllm._C"] = None


def _define_torchvision_operators() -> None:
    """Lets torchvision be imported beside a CPU build of torch.

    The worker imports multimodal models. The wheel on the Python package index has no
    operators for a +cpu torch, and fails where it gives them fake kernels.
    """
    names = """nms qnms roi_align _roi_align_backward ps_roi_align
        _ps_roi_align_backward roi_pool _roi_pool_backward ps_roi_pool
        _ps_roi_pool_backward deform_conv2d _deform_conv2d_backward qroi_align"""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in names.split():
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor x) -> Tensor")
    _keep.append(library)


_keep: list[torch.library.Library] = []
