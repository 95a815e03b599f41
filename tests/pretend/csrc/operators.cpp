// Operators: PyTorch's kernels for the host compute them, later and in the order of a stream.
//
//   1  the operator on `meta` tensors tells shapes and types of what comes out, without data
//   2  memory for that is allocated, and returned to the program at once
//   3  the operator on the host's kernels is queued; its arguments are views of the device's memory
//
// What has no meta kernel, because its shapes depend on data (`nonzero`), makes the host wait, as on CUDA. So does a
// copy from or to the host, unless the memory there is page-locked.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "device.h"

namespace pretend {

using at::Tensor;
using torch::jit::Stack;

bool is_on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

Tensor host_view(const Tensor& tensor) {
  void* address = tensor.numel() ? tensor.mutable_data_ptr() : nullptr;
  auto view = at::from_blob(address, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()));
  if (tensor.is_conj()) view = view.conj();
  return tensor.is_neg() ? view._neg_view() : view;
}

namespace {

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Tensor empty_strided_like(const Tensor& meta) {
  return at::detail::empty_strided_generic(
      meta.sizes(), meta.strides(), device_allocator(), KEYS, meta.scalar_type());
}

// Replace each tensor of the values, also those in lists, by what the function returns.
void map_tensors(Stack& values, const std::function<Tensor(const Tensor&)>& function) {
  auto map = [&](const Tensor& tensor) { return tensor.defined() ? function(tensor) : tensor; };
  for (auto& value : values) {
    if (value.isTensor()) {
      value = map(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const auto& tensor : value.toTensorVector()) list.push_back(map(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<Tensor>(map(*tensor)) : tensor);
      value = list;
    }
  }
}

std::vector<Tensor> tensors_in(Stack values) {
  std::vector<Tensor> found;
  map_tensors(values, [&](const Tensor& tensor) {
    found.push_back(tensor);
    return tensor;
  });
  return found;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_generator(const c10::Argument& argument) {
  return argument.type()->str().find("Generator") != std::string::npos;
}

void resize(c10::TensorImpl* tensor, c10::IntArrayRef sizes, at::OptionalIntArrayRef strides) {
  if (strides) {
    tensor->set_sizes_and_strides(sizes, *strides);
  } else {
    tensor->set_sizes_contiguous(sizes);
  }
  size_t bytes = at::detail::computeStorageNbytes(
      tensor->sizes(), tensor->strides(), tensor->dtype().itemsize(), tensor->storage_offset());
  if (tensor->storage().nbytes() < bytes) resize_storage(tensor->storage(), bytes);
}

// One call of an operator.
struct Call {
  Call(const c10::OperatorHandle& handle, Stack* stack) : op(handle), schema(handle.schema()) {
    auto number = schema.arguments().size();
    arguments.assign(stack->end() - number, stack->end());
    torch::jit::drop(*stack, number);
  }

  // Return the device of all tensors, or else the one that is asked for. A number on the host is an argument like any
  // other, and indices are copied; all else is the program's mistake.
  c10::Device device() const {
    std::optional<c10::Device> found;
    bool on_host = false;
    for (const auto& tensor : tensors_in(arguments)) {
      TORCH_CHECK(
          !found || !is_on_device(tensor) || *found == tensor.device(),
          "Expected all tensors to be on the same device, but ", schema.name(), " got ", *found, " and ",
          tensor.device());
      if (is_on_device(tensor)) found = tensor.device();
      on_host |= tensor.is_cpu() && tensor.dim() > 0;
    }
    for (const auto& value : arguments)
      if (!found && value.isDevice() && value.toDevice().type() == TYPE) found = value.toDevice();
    c10::Device place(TYPE, found ? index_of(*found) : current_device());
    if (on_host) {
      TORCH_CHECK(
          schema.name().find("index") != std::string::npos, "Expected all tensors to be on the same device, but ",
          schema.name(), " got one on the CPU");
      host_waits(current_queue(place.index()), "indices on the host");
    }
    return place;
  }

  // Return what comes out, on `meta`, and which arguments take which shape; nothing without a meta kernel.
  std::optional<Stack> shapes(std::vector<std::pair<Tensor, Tensor>>& written) const {
    Stack values = arguments;
    for (size_t i = 0; i < values.size(); ++i) {
      const auto& argument = schema.arguments()[i];
      Stack one{values[i]};
      map_tensors(one, [&](const Tensor& tensor) {
        if (!is_on_device(tensor)) return tensor;
        auto options = tensor.options().device(at::kMeta).pinned_memory(false);
        auto meta = at::empty_strided(tensor.sizes(), tensor.strides(), options);
        if (is_written(argument)) written.emplace_back(tensor, meta);
        return meta;
      });
      values[i] = one[0];
      if (values[i].isDevice()) values[i] = c10::Device(at::kMeta);
      if (is_generator(argument)) values[i] = c10::IValue();
    }
    try {
      at::AutoDispatchBelowAutograd below;
      op.callBoxed(&values);
      return values;
    } catch (const std::exception& error) {  // of C++ or Python
      py::gil_scoped_acquire gil;
      std::string text = error.what();
      for (const char* sign : {"meta", "Meta", "NotImplemented", "data-dependent", "DataDependent"})
        if (text.find(sign) != std::string::npos) return std::nullopt;
      if (!dynamic_cast<const c10::NotImplementedError*>(&error)) throw;
      return std::nullopt;
    }
  }

  // Return the arguments for the host's kernel.
  Stack for_host(int device) const {
    Stack values = arguments;
    // The program may change a number on the host before the kernel runs.
    map_tensors(values, [](const Tensor& tensor) { return is_on_device(tensor) ? host_view(tensor) : tensor.clone(); });
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i].isDevice()) values[i] = c10::Device(at::kCPU);
      if (is_generator(schema.arguments()[i])) values[i] = for_kernel(values[i].toOptional<at::Generator>(), device);
    }
    return values;
  }

  // Return the argument that is also the result of this number, as in `add_`.
  const c10::IValue* returned_argument(size_t result) const {
    const auto* alias = schema.returns()[result].alias_info();
    if (alias == nullptr || !alias->isWrite()) return nullptr;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* other = schema.arguments()[i].alias_info();
      if (other != nullptr && *other == *alias) return &arguments[i];
    }
    return nullptr;
  }

  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  Stack arguments;
};

void run_on_host(const c10::OperatorHandle& op, Stack& values) {
  // PyTorch 2.11 takes several results from arguments that it has let go of (pytorch/pytorch#174807).
  Stack kept = values;
  at::AutoDispatchBelowAutograd below;
  at::NoGradGuard no_grad;
  op.callBoxed(&values);
}

Stack run_while_host_waits(const Call& call, Queue& queue) {
  host_waits(queue, call.schema.name().c_str());
  auto values = call.for_host(queue.device);
  run_on_host(call.op, values);
  for (size_t i = 0; i < values.size(); ++i) {
    if (const auto* argument = call.returned_argument(i)) values[i] = *argument;
  }
  map_tensors(values, [](const Tensor& tensor) {
    if (!tensor.is_cpu()) return tensor;
    auto placed = empty_strided_like(tensor);
    host_view(placed).copy_(tensor);
    return placed;
  });
  return values;
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  raise_if_failed();
  Call call(op, stack);
  c10::DeviceGuard guard(call.device());
  auto& queue = current_queue(current_device());
  std::vector<std::pair<Tensor, Tensor>> written;
  auto results = call.shapes(written);
  if (!results) {
    for (auto& value : run_while_host_waits(call, queue)) stack->push_back(value);
    return;
  }
  for (auto& [tensor, meta] : written) {
    // Only what is empty grows: some meta kernels give others a wrong shape.
    if (tensor.sizes() == meta.sizes() || tensor.numel() > 0) continue;
    auto strides = meta.is_contiguous() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(meta.strides());
    resize(tensor.unsafeGetTensorImpl(), meta.sizes(), strides);
  }
  std::vector<std::vector<Tensor>> targets;  // views of the memory of each new result
  for (size_t i = 0; i < results->size(); ++i) {
    targets.emplace_back();
    if (const auto* argument = call.returned_argument(i)) {
      (*results)[i] = *argument;
      continue;
    }
    TORCH_CHECK(!call.schema.returns()[i].alias_info(), "pretend: no kernel makes the view ", call.schema.name());
    Stack one{(*results)[i]};
    map_tensors(one, [&](const Tensor& meta) {
      auto placed = empty_strided_like(meta);
      targets.back().push_back(host_view(placed));
      return placed;
    });
    (*results)[i] = one[0];
  }
  queue.push([op = call.op, values = call.for_host(queue.device), targets]() mutable {
    run_on_host(op, values);
    for (size_t i = 0; i < targets.size(); ++i) {
      auto computed = targets[i].empty() ? std::vector<Tensor>() : tensors_in({values[i]});
      for (size_t k = 0; k < computed.size(); ++k)
        // Where a result means nothing, as a batch's mean in evaluation, the host's kernel makes none.
        if (computed[k].sizes() == targets[i][k].sizes()) targets[i][k].copy_(computed[k]);
    }
  });
  if (order.blocking) wait_silently(queue.mark());
  for (auto& value : *results) stack->push_back(value);
}

// PyTorch's own for the host draws from the host's generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0), mask};
}

void attend_by_matrix_products(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->push_back(int64_t(0));
}

// Tensors without a kernel: memory and views of it.

Tensor empty(
    c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> layout) {
  c10::DeviceGuard guard(device.value_or(c10::Device(TYPE)));
  return at::detail::empty_generic(sizes, device_allocator(), KEYS, c10::dtype_or_default(dtype), layout);
}

Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(TYPE)));
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(), KEYS, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& tensor, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> layout) {
  resize(tensor.unsafeGetTensorImpl(), sizes, {});
  if (layout && *layout != c10::MemoryFormat::Preserve) tensor.unsafeGetTensorImpl()->empty_tensor_restride(*layout);
  return tensor;
}

Tensor& set_storage_offset(
    Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  bool contiguous = strides.empty() && !sizes.empty();
  resize(impl, sizes, contiguous ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(strides));
  return tensor;
}

void record_tensor_on_stream(Tensor& tensor, c10::Stream stream) {
  record_stream(tensor.storage().data_ptr(), stream);
}

// Copies.

std::atomic<int> num_pending_reads{0};  // copies to page-locked memory
constexpr size_t STAGED_BYTES = 65536;  // CUDA's driver takes so much of pageable memory along with the command

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  raise_if_failed();
  if (from.numel() == 0) return to;
  bool to_device = is_on_device(to), from_device = is_on_device(from);
  auto& queue = current_queue((to_device ? to : from).device().index());
  auto push = [&](const Tensor& from, const Tensor& to) {
    queue.push([from, to] {
      at::NoGradGuard no_grad;
      to.copy_(from);
    });
  };
  if (to_device && from_device) {
    auto& source = current_queue(from.device().index());
    // What both devices' streams do before and after comes before and after the copy.
    if (&source != &queue) queue.wait(source.mark());
    push(host_view(from), host_view(to));
    if (&source != &queue) source.wait(queue.mark());
    return to;
  }
  // The task keeps the host's tensor: PyTorch reuses page-locked memory only after copies from and to it.
  bool is_staged = non_blocking && to_device && from.nbytes() <= STAGED_BYTES;
  bool waits = !non_blocking || !is_pinned((to_device ? from : to).const_data_ptr());
  auto source = from_device ? host_view(from) : waits && is_staged ? from.clone() : from;
  auto target = to_device ? host_view(to) : to;
  if (waits) {
    push(source, target);
  } else if (to_device) {
    // What was queued before may still write there.
    bool is_filled = num_pending_reads == 0;
    queue.push([source, target, is_filled, before = digest_of(source)] {
      TORCH_CHECK(
          !is_filled || digest_of(source) == before,
          "page-locked memory was written before the copy from it had been made");
      at::NoGradGuard no_grad;
      target.copy_(source);
    });
  } else {
    poison(target);
    ++num_pending_reads;
    push(source, target);
    queue.push([] { --num_pending_reads; });
  }
  if (waits && !is_staged) host_waits(queue, to_device ? "copy to the device" : "copy to the host");
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& tensor) {
  host_waits(current_queue(tensor.device().index()), "item");
  return at::_local_scalar_dense(host_view(tensor));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  // PyTorch's own of these call others, which only other devices have, or (`mse_loss`) resize their result on the way.
  for (const char* name : {"convolution", "convolution_backward", "mse_loss"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
  library.impl("_fused_sdp_choice", torch::CppFunction::makeFromBoxedFunction<&attend_by_matrix_products>());
  library.impl("native_dropout", native_dropout);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("resize_", resize_);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage", at::native::set_);
  library.impl("set_.source_Storage_storage_offset", set_storage_offset);
  library.impl("record_stream", record_tensor_on_stream);
}

// Autocast chooses types by the same lists as on CUDA.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

#define IN_HALF(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define IN_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(IN_HALF)
  AT_FORALL_FP32(IN_FP32)
  AT_FORALL_PROMOTE(IN_WIDEST)
}
}  // namespace

}  // namespace pretend
