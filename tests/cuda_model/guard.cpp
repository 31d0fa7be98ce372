// One CUDA device for a torch that was built without CUDA: streams are numbers, and an event is a number that stands for
// a moment of a stream. It executes nothing. Autograd, FakeTensorMode and torch's stream guards then work on cuda:0 as
// in a build with CUDA; what they record and wait for is reported to two functions, which the stream model sets.
//
// Loaded before torch is imported: torch looks up the hooks of an accelerator once, at the first question about it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdint>

namespace {

using EventReport = void (*)(int64_t event, int64_t stream);

const c10::Device kDevice{c10::DeviceType::CUDA, 0};
thread_local int64_t stream_of_thread = 0;
std::atomic<int64_t> last_event{0};
std::atomic<EventReport> recorded{nullptr};
std::atomic<EventReport> awaited{nullptr};

c10::Stream numbered(int64_t number) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, number);
}

class OneDevice final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  // The device is always the same one, so there is nothing to switch.
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const override { return numbered(stream_of_thread); }
  c10::Stream getDefaultStream(c10::Device) const override { return numbered(0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = stream_of_thread;
    stream_of_thread = next.id();
    return numbered(before);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = reinterpret_cast<void*>(++last_event);
    }
    if (const auto report = recorded.load()) {
      report(reinterpret_cast<int64_t>(*event), stream.id());
    }
  }
  void block(void* event, const c10::Stream& stream) const override {
    const auto report = awaited.load();
    if (event != nullptr && report) {
      report(reinterpret_cast<int64_t>(event), stream.id());
    }
  }

  // Everything is done as soon as it is asked for: waits of the host are counted in Python.
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new OneDevice());

struct OneDeviceHooks final : at::CUDAHooksInterface {
  explicit OneDeviceHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  void deviceSynchronize(c10::DeviceIndex) const override {}
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

}  // namespace

namespace at {
using ::OneDeviceHooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", OneDeviceHooks)
}  // namespace at

extern "C" {
int64_t current_stream() { return stream_of_thread; }
void set_current_stream(int64_t number) { stream_of_thread = number; }
void report_events(EventReport on_record, EventReport on_wait) {
  recorded = on_record;
  awaited = on_wait;
}
}
