// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi

// The device hpu:0 in host memory. Its tensors say that they are on hpu; every operator
// runs on CPU tensors that share their memory. Operands on both devices are an error.

#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::IValue;

const c10::Device HPU(c10::DeviceType::HPU, 0);
const c10::DispatchKeySet HPU_KEYS(c10::DispatchKey::HPU);
const c10::DispatchKeySet CPU_KEYS(c10::DispatchKey::CPU);

// ---- Memory: the host's, counted.

std::atomic<int64_t> allocated{0};
std::atomic<int64_t> peak{0};

void count(int64_t bytes) {
  const int64_t now = allocated += bytes;
  int64_t before = peak;
  while (before < now && !peak.compare_exchange_weak(before, now)) {
  }
}

// What a pointer to device memory keeps alive: memory of its own, or that of a storage.
struct Block {
  c10::DataPtr memory;
  c10::Storage storage;
  int64_t counted;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  count(-block->counted);
  delete block;
}

c10::DataPtr pointer(void* data, Block* block, c10::Device device) {
  count(block->counted);
  return {data, block, &release, device};
}

struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto memory = c10::GetCPUAllocator()->allocate(bytes);
    // NaN in every floating dtype, so that a result tells of memory that was read unwritten.
    if (bytes > 0) {
      std::memset(memory.get(), 0xFF, bytes);
    }
    void* data = memory.get();
    auto* block = new Block{std::move(memory), {}, static_cast<int64_t>(bytes)};
    return pointer(data, block, HPU);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

HostMemory memory;
REGISTER_ALLOCATOR(c10::DeviceType::HPU, &memory);

// ---- One device, one stream, on which all has already happened.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::DeviceType::HPU;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return HPU;
  }
  c10::Device getDevice() const override {
    return HPU;
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, HPU);
  }
  c10::Stream exchangeStream(c10::Stream) const override {
    return c10::Stream(c10::Stream::DEFAULT, HPU);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
};

C10_REGISTER_GUARD_IMPL(HPU, Guard)

// ---- The same memory, seen as a tensor of the other device.

Tensor seen_on(c10::Device device, const Tensor& tensor, bool counted = false) {
  const c10::Storage& shared = tensor.storage();
  const auto bytes = static_cast<int64_t>(shared.nbytes());
  auto* block = new Block{{}, shared, counted ? bytes : 0};
  c10::Allocator* allocator = &memory;
  if (device.is_cpu()) {
    allocator = c10::GetCPUAllocator();
  }
  c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      bytes,
      pointer(const_cast<void*>(shared.data()), block, device),
      allocator,
      /*resizable=*/true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), device.is_cpu() ? CPU_KEYS : HPU_KEYS, tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return result;
}

Tensor on_host(const Tensor& tensor) {
  return tensor.device().is_cpu() ? tensor : seen_on(c10::kCPU, tensor);
}

template <typename Function>
IValue each_tensor(const IValue& value, Function& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (!value.isList()) {
    return value;
  }
  const auto list = value.toList();
  auto changed = c10::impl::GenericList(list.elementType());
  for (const IValue& element : list) {
    changed.push_back(each_tensor(element, change));
  }
  return changed;
}

// ---- Every operator that has no kernel for HPU: the one for CPU.

struct Call {
  std::vector<std::pair<Tensor, Tensor>> operands; // on hpu, and as CPU sees them
  bool has_host_tensor = false;

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (tensor.device().is_cpu()) {
      has_host_tensor |= tensor.dim() > 0; // a scalar serves on any device
      return tensor;
    }
    for (const auto& [hpu, host] : operands) {
      if (hpu.is_same(tensor)) {
        return host;
      }
    }
    operands.emplace_back(tensor, seen_on(c10::kCPU, tensor));
    return operands.back().second;
  }

  Tensor to_hpu(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) {
      return tensor;
    }
    bool is_new = true;
    for (auto& [hpu, host] : operands) {
      if (host.is_same(tensor)) {
        take_shape(hpu, host);
        return hpu;
      }
      is_new &= host.storage().data() != tensor.storage().data();
    }
    return seen_on(HPU, tensor, is_new);
  }

  // An operator may have given its out= argument another size.
  static void take_shape(Tensor& hpu, const Tensor& host) {
    if (hpu.sizes() == host.sizes() && hpu.strides() == host.strides()) {
      return;
    }
    auto* impl = hpu.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(seen_on(HPU, host, true).storage());
    impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

  // As on other devices: indices may lie on the host, and collectives take both.
  void check(const std::string& name) const {
    const bool any = name == "aten::index" || name == "aten::index_put_" ||
        name == "aten::_index_put_impl_" || name.rfind("c10d::", 0) == 0;
    TORCH_CHECK(
        any || operands.empty() || !has_host_tensor,
        "Expected all tensors to be on the same device, but found at least two "
        "devices, hpu:0 and cpu, in ",
        name);
  }
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call;
  auto to_host = [&](const Tensor& tensor) { return call.to_host(tensor); };
  auto to_hpu = [&](const Tensor& tensor) { return call.to_hpu(tensor); };
  const auto& schema = op.schema();
  const size_t inputs = schema.arguments().size();
  for (size_t n = stack->size() - inputs; n < stack->size(); ++n) {
    IValue& value = (*stack)[n];
    value = value.isDevice() ? IValue(c10::Device(c10::kCPU))
                             : each_tensor(value, to_host);
  }
  call.check(schema.name());
  op.redispatchBoxed(CPU_KEYS, stack);
  const size_t outputs = schema.returns().size();
  for (size_t n = stack->size() - outputs; n < stack->size(); ++n) {
    (*stack)[n] = each_tensor((*stack)[n], to_hpu);
  }
}

// ---- Operators that make, copy and reshape tensors.

Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_generic(size, &memory, HPU_KEYS, type, format);
}

Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  const auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(size, stride, &memory, HPU_KEYS, type);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

// Not non_blocking: on its way to the host that asks for pinned memory.
Tensor to_copy(
    const Tensor& from,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pinned,
    bool,
    std::optional<at::MemoryFormat> format) {
  return at::native::_to_copy(from, dtype, layout, device, pinned, false, format);
}

Tensor& set_storage(
    Tensor& tensor,
    c10::Storage storage,
    int64_t offset,
    at::IntArrayRef size,
    at::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return tensor;
}

TORCH_LIBRARY_IMPL(_, HPU, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_to_copy", TORCH_FN(to_copy));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
}

} // namespace

// ---- For torch.hpu, through ctypes.

extern "C" {

int64_t soft_gaudi_allocated() {
  return allocated;
}

int64_t soft_gaudi_peak() {
  return peak;
}

void soft_gaudi_reset_peak() {
  peak = allocated.load();
}
}
