// Lets torch trace for CUDA where there is no CUDA device: fake tensors pass through the autograd engine, the device
// guards and the dispatcher as if there was one device, on which nothing ever runs.
//
// Three objects of torch are answered for while `shardcompile_pretend` is on, and answer for themselves again after
// `shardcompile_stop`: the device guard for CUDA, the hooks by which code for the CPU asks about CUDA, and the choice of
// a kernel for attention, which would look up what the device can do.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <optional>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device kDevice(DeviceType::CUDA, 0);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, kDevice); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
};

// `init` is left as it is, an error: whatever wants to run something on the device fails with torch's own message.
struct Hooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
};

// Torch keeps its hooks object for good once it was asked for. What can be changed, and changed back, is its type: an
// object of a class without members is its pointer to the table of virtual functions.
static_assert(sizeof(Hooks) == sizeof(void*) && sizeof(at::CUDAHooksInterface) == sizeof(void*));

void*& type_of(const at::CUDAHooksInterface& hooks) {
  return *reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&hooks));
}

// Attention as on an Ampere GPU or a later one: flash or memory-efficient, where the arguments allow it.

std::optional<int64_t> features(const at::Tensor& x) { return x.sym_size(-1).maybe_as_int(); }

bool four_dims_known_features(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && features(q) && features(k) && features(v);
}

bool flash_fits(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool masked) {
  return !masked && at::isReducedFloatingType(q.scalar_type()) && features(q) == features(k) &&
      features(q) == features(v) && *features(q) <= 256;
}

bool efficient_fits(const at::Tensor& q, const at::Tensor& v, bool shared_heads) {
  const auto type = q.scalar_type();
  const int64_t aligned = type == at::kFloat ? 4 : 8;  // 16 bytes
  return !shared_heads && (type == at::kFloat || at::isReducedFloatingType(type)) && *features(q) % aligned == 0 &&
      *features(v) % aligned == 0;
}

int64_t choose_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const std::optional<at::Tensor>& mask,
    double,
    bool,
    std::optional<double>,
    bool shared_heads) {
  auto& context = at::globalContext();
  const bool known = four_dims_known_features(q, k, v);
  for (auto backend : context.sDPPriorityOrder()) {
    const bool chosen = backend == at::SDPBackend::flash_attention
        ? known && context.userEnabledFlashSDP() && flash_fits(q, k, v, mask.has_value())
        : backend == at::SDPBackend::efficient_attention
        ? known && context.userEnabledMemEfficientSDP() && efficient_fits(q, v, shared_heads)
        : backend == at::SDPBackend::math && context.userEnabledMathSDP();
    if (chosen) {
      return static_cast<int64_t>(backend);
    }
  }
  return static_cast<int64_t>(at::SDPBackend::math);
}

// A stub's only member is its table of pointers, which it does not let one read.
static_assert(sizeof(at::native::_fused_sdp_choice_stub) == sizeof(at::native::DispatchStubImpl));

void*& attention_choice() {
  return reinterpret_cast<at::native::DispatchStubImpl&>(at::native::_fused_sdp_choice_stub).cuda_dispatch_ptr;
}

auto& registered_guard() {
  return c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)];
}

bool pretending = false;
const c10::impl::DeviceGuardImplInterface* own_guard = nullptr;
void* own_type = nullptr;
void* own_choice = nullptr;

}  // namespace

// Returns whether it was off.
extern "C" bool shardcompile_pretend() {
  if (pretending) {
    return false;
  }
  static const Guard guard;
  static const Hooks hooks;
  own_guard = registered_guard().exchange(&guard);
  own_type = type_of(at::detail::getCUDAHooks());
  type_of(at::detail::getCUDAHooks()) = type_of(hooks);
  own_choice = attention_choice();
  attention_choice() = reinterpret_cast<void*>(&choose_attention);
  return pretending = true;
}

extern "C" void shardcompile_stop() {
  if (pretending) {
    registered_guard().store(own_guard);
    type_of(at::detail::getCUDAHooks()) = own_type;
    attention_choice() = own_choice;
    pretending = false;
  }
}
