// Operators of tensors of the device.
#pragma once

#include <ATen/core/Tensor.h>

namespace pretend {

bool is_on_device(const at::Tensor& tensor);
// A tensor of the host in the same memory, for a kernel that runs in a stream. It keeps nothing alive.
at::Tensor host_view(const at::Tensor& tensor);

}  // namespace pretend
