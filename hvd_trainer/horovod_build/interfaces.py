"""The change that lets all of Horovod's connections take the network interface that was chosen."""

from __future__ import annotations

from hvd_trainer.horovod_build.source import Replacement

INTERFACE_CHANGES = (
    Replacement(
        "horovod/common/gloo/gloo_context.cc",
        "  device_attr.iface = gloo_iface_;\n"
        "  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n\n"
        "  global_ctx = global_context.ctx;\n",
        "  gloo_iface_ = global_context.gloo_iface_;\n"
        "  device_attr.iface = gloo_iface_;\n"
        "  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n\n"
        "  global_ctx = global_context.ctx;\n",
        "process sets, that of all ranks among them, ignored HOROVOD_GLOO_IFACE for what a host's own "
        "name leads to: 127.0.1.1 on Debian, where other hosts do not find it",
    ),
)
