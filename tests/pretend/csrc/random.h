// Random numbers of the device.
#pragma once

#include <ATen/core/Generator.h>

namespace pretend {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
// For one kernel: the numbers depend on how many kernels have drawn from the generator before, not on when they run.
at::Generator for_kernel(const std::optional<at::Generator>& generator, int device);

}  // namespace pretend
