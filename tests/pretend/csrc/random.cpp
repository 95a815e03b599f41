// Generators of the device: their state is on the host, and each kernel takes its place in the sequence with it when
// it is queued, as on CUDA. So reading the state waits for nothing, and the order of streams changes no numbers.
#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>

#include "stream.h"

namespace pretend {

namespace {
constexpr uint64_t DEFAULT_SEED = 67280421310721;

struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device)
      : GeneratorImpl(c10::Device(TYPE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::detail::createCPUGenerator(DEFAULT_SEED)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "pretend: generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "pretend: generators have no offset"); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->host = host.clone();
    return copy;
  }

  at::Generator host;
};
}  // namespace

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int number = 0; number < num_devices(); ++number) made->push_back(new_generator(number));
    return made;
  }();
  return all->at(device);
}

at::Generator new_generator(int device) { return at::make_generator<Generator>(device); }

at::Generator for_kernel(const std::optional<at::Generator>& generator, int device) {
  const at::Generator& used = generator && generator->defined() ? *generator : default_generator(device);
  TORCH_CHECK(
      used.device().type() == TYPE && used.device().index() == device,
      "a generator of ", used.device(), " for a tensor of device ", device);
  auto& host = static_cast<Generator*>(used.unsafeGetGeneratorImpl())->host;
  std::lock_guard<std::mutex> lock(host.mutex());
  return at::detail::createCPUGenerator(static_cast<at::CPUGeneratorImpl*>(host.unsafeGetGeneratorImpl())->random64());
}

}  // namespace pretend
