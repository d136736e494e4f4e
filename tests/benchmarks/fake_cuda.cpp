// Let torch's autograd run on fake tensors of a GPU on a machine without a driver. The effect lasts for the process.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
const c10::Device device(c10::DeviceType::CUDA, 0);
const c10::Stream stream(c10::Stream::DEFAULT, device);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return device; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream; }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
};

const Guard guard;
const Hooks hooks;
}  // namespace

extern "C" void install() {
  const auto type = static_cast<size_t>(c10::DeviceType::CUDA);
  c10::impl::device_guard_impl_registry[type].store(&guard);
  // torch holds its own hooks by a constant pointer, so that only their virtual functions can be replaced.
  auto& known = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  reinterpret_cast<const void**>(&known)[0] = reinterpret_cast<const void* const*>(&hooks)[0];
}
