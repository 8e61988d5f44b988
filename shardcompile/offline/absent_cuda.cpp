// Lets torch trace for CUDA where there is no CUDA device: fake tensors pass through the autograd engine, the device
// guards and the dispatcher as if there was one device, on which nothing ever runs.
//
// Two objects of torch are answered for while `shardcompile_pretend` is on, and answer for themselves again after
// `shardcompile_stop`: the device guard for CUDA, and the hooks by which code for the CPU asks about CUDA.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <type_traits>

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

auto& registered_guard() {
  return c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)];
}

bool pretending = false;
const c10::impl::DeviceGuardImplInterface* own_guard = nullptr;
void* own_type = nullptr;

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
  return pretending = true;
}

extern "C" void shardcompile_stop() {
  if (pretending) {
    registered_guard().store(own_guard);
    type_of(at::detail::getCUDAHooks()) = own_type;
    pretending = false;
  }
}
