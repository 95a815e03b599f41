// Collectives of tensors of the device.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace pretend {

// gloo: moves the bytes.
c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size);

}  // namespace pretend
