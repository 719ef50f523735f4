// A GPU that can't compute, one of NVIDIA's or, where FAKE_MAC is set, one of Apple's: what autograd
// asks of it while FakeTensorMode runs the rest, in a PyTorch that was built for the CPU. Loaded before
// Python imports torch.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>

namespace {

const bool is_mac = std::getenv("FAKE_MAC") != nullptr;

template <c10::DeviceType kind>
struct Guard : c10::impl::NoOpDeviceGuardImpl<kind> {
  c10::Device getDevice() const override { return {kind, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, getDevice());
  }
  c10::Stream getDefaultStream(c10::Device of) const override { return getStream(of); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

constexpr auto cuda = c10::DeviceType::CUDA, mps = c10::DeviceType::MPS;
c10::impl::DeviceGuardImplRegistrar cuda_guard(cuda, new Guard<cuda>());
c10::impl::DeviceGuardImplRegistrar mps_guard(mps, new Guard<mps>());

template <class Interface, bool of_mac>
struct Hooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return of_mac == is_mac; }
  bool isAvailable() const override { return of_mac == is_mac; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace

namespace at {

// PyTorch looks for them by these names
struct CUDAHooks : Hooks<CUDAHooksInterface, false> {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return !is_mac; }
};

struct MPSHooks : Hooks<MPSHooksInterface, true> {
  bool hasMPS() const override { return is_mac; }
};

REGISTER_CUDA_HOOKS(CUDAHooks)
REGISTER_MPS_HOOKS(MPSHooks)

}  // namespace at
