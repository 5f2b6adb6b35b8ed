#include "nn/core/parameter.h"

#include <algorithm>
#include <utility>

#include "nn/base/check.h"
#include "nn/base/memory.h"
#include "nn/core/rng.h"

namespace topknot {

ParameterArena::ParameterArena(const std::vector<Parameter*>& registered,
                               const CompressiblePredicate& compressible, const FrozenPredicate& frozen,
                               Device device, bool zero)
    : device_(device) {
  double floats = 0;  // sizes beyond any memory would wrap around as integers
  for (Parameter* parameter : registered) {
    parameter->trained_ = !frozen || !frozen(*parameter);
    parameter->compressible_ = parameter->trained_ && compressible(*parameter);
    (parameter->trained_ ? order_ : frozen_).push_back(parameter);
    floats += (parameter->trained_ ? 3.0 : 1.0) * static_cast<double>(parameter->numel());
  }
  std::reverse(order_.begin(), order_.end());
  const auto place = [](const Parameter* p) { return std::pair(!p->compressible_, p->numel() % 4 != 0); };
  std::stable_sort(order_.begin(), order_.end(),
                   [&](const Parameter* a, const Parameter* b) { return place(a) < place(b); });
  for (Parameter* parameter : order_) {
    parameter->offset_ = size_;
    size_ += parameter->numel();
    if (parameter->compressible_) compressible_size_ = size_;
  }
  whole_size_ = size_;
  for (Parameter* parameter : frozen_) {
    parameter->offset_ = whole_size_;
    whole_size_ += parameter->numel();
  }
  const DeviceBackend& memory = backend(device_);
  const char* what = "the weights, gradients and residuals of the model";
  // The system may promise more memory than there is, and end the process when it is used.
  if (zero && device_.kind == DeviceKind::cpu && 4 * floats > memory_limit())
    throw OutOfMemory(what, 4 * floats);
  with_memory(what, 4 * floats, [&] {
    weights_ = memory.allocate(whole_size_);
    for (float*& side : gradients_) {
      side = memory.allocate(size_);
      if (zero) memory.fill_zero(side, size_);  // an empty residual
    }
  });
  for (Parameter* parameter : order_) {
    parameter->value_ = weights_ + parameter->offset_;
    for (int side : {0, 1}) parameter->gradient_[side] = gradients_[side] + parameter->offset_;
    parameter->variable_ = Variable(*parameter, Tensor::view(parameter->value_, parameter->shape_, device_));
  }
  for (Parameter* parameter : frozen_) {
    parameter->value_ = weights_ + parameter->offset_;
    parameter->variable_ = Variable(Tensor::view(parameter->value_, parameter->shape_, device_));
  }
}

ParameterArena::~ParameterArena() {
  const DeviceBackend& memory = backend(device_);
  memory.release(weights_, whole_size_);
  for (float* side : gradients_) memory.release(side, size_);
}

int ParameterArena::side_of(std::size_t begin, std::size_t end) const {
  TOPKNOT_CHECK(begin <= end && end <= size_, "slice outside the arena");
  int side = -1;
  std::size_t covered = begin;
  for (const Parameter* parameter : order_) {
    if (parameter->offset() < begin || parameter->offset() >= end) continue;
    TOPKNOT_CHECK(side < 0 || side == parameter->side_, "a slice whose parameters are on different sides");
    side = parameter->side_;
    covered += parameter->numel();
  }
  TOPKNOT_CHECK(covered == end, "a slice must lie on parameter boundaries");
  return std::max(side, 0);
}

void ParameterArena::swap_gradient_and_residual(std::size_t begin, std::size_t end) {
  const int side = side_of(begin, end);
  for (Parameter* parameter : order_)
    if (parameter->offset() >= begin && parameter->offset() < end) parameter->side_ = 1 - side;
}

Parameter& ParameterStore::add(const std::string& name, const Shape& shape, Initializer init) {
  TOPKNOT_CHECK(!arena_, "parameter '" + name + "' registered after build()");
  for (const auto& other : parameters_)
    TOPKNOT_CHECK(other->name_ != name, "parameter '" + name + "' registered twice");
  auto parameter = std::make_unique<Parameter>();
  parameter->name_ = name;
  parameter->shape_ = shape;
  parameter->init_ = std::move(init);
  parameters_.push_back(std::move(parameter));
  return *parameters_.back();
}

Buffer& ParameterStore::add_buffer(const std::string& name, std::size_t size, float value) {
  buffers_.push_back(with_memory("'" + name + "' of the model", 4.0 * static_cast<double>(size), [&] {
    return std::make_unique<Buffer>(Buffer{name, std::vector<float>(size, value)});
  }));
  return *buffers_.back();
}

Buffer& ParameterStore::add_state(const std::string& name, std::size_t size) {
  Buffer& state = add_buffer(name, size, 0.0f);
  state.recurrent = true;
  return state;
}

void ParameterStore::reset_states() {
  for (const auto& buffer : buffers_) {
    if (!buffer->recurrent) continue;
    std::fill(buffer->values.begin(), buffer->values.end(), 0.0f);
    if (buffer->device) backend(device_).fill_zero(buffer->device, buffer->values.size());
  }
}

// A convolution comes first if there is one: a first fully connected layer is a matrix as the others are.
void ParameterStore::mark_ends() {
  Parameter *first = nullptr, *last = nullptr;
  for (const auto& parameter : parameters_) {
    if (parameter->outer_) return;
    if (parameter->shape_.rank() == 4 && !first) first = parameter.get();
    if (parameter->shape_.rank() > 1) last = parameter.get();
  }
  for (Parameter* end : {first, last})
    if (end) end->mark_outer();
}

ParameterArena& ParameterStore::build(const CompressiblePredicate& compressible, std::uint64_t seed,
                                      const FrozenPredicate& frozen, bool initialise) {
  TOPKNOT_CHECK(!arena_, "build() is called once");
  mark_ends();
  std::vector<Parameter*> registered;
  for (const auto& parameter : parameters_) registered.push_back(parameter.get());
  arena_ = std::make_unique<ParameterArena>(registered, compressible, frozen, device_, initialise);
  // Made on the host, so that every device starts from the same bits.
  std::vector<float> values;
  for (std::size_t i = 0; i < registered.size() && initialise; ++i) {
    values.resize(registered[i]->numel());
    registered[i]->init_(values, CounterRng(seed, RngUse::init, static_cast<std::uint32_t>(i)));
    backend(device_).to_device(registered[i]->value(), values.data(), values.size());
  }
  if (device_.kind != DeviceKind::cpu) {
    for (const auto& buffer : buffers_) statistics_size_ += buffer->values.size();
    statistics_ = backend(device_).allocate(statistics_size_);
    float* at = statistics_;
    for (const auto& buffer : buffers_) buffer->device = std::exchange(at, at + buffer->values.size());
    statistics_to_device();
  }
  return *arena_;
}

ParameterStore::~ParameterStore() {
  if (statistics_) backend(device_).release(statistics_, statistics_size_);
}

std::vector<std::span<float>> ParameterStore::statistics() {
  std::vector<std::span<float>> all;
  if (statistics_size_ > 0)
    all.emplace_back(statistics_, statistics_size_);
  else
    for (const auto& buffer : buffers_) all.emplace_back(buffer->values);
  return all;
}

void ParameterStore::statistics_to_host() {
  if (!statistics_) return;
  for (const auto& buffer : buffers_)
    backend(device_).to_host(buffer->values.data(), buffer->device, buffer->values.size());
}

void ParameterStore::statistics_to_device() {
  if (!statistics_) return;
  for (const auto& buffer : buffers_)
    backend(device_).to_device(buffer->device, buffer->values.data(), buffer->values.size());
}

std::vector<float> ParameterArena::host_weights() const {
  std::vector<float> weights(whole_size_);
  backend(device_).to_host(weights.data(), weights_, whole_size_);
  return weights;
}

ParameterArena& ParameterStore::arena() {
  TOPKNOT_CHECK(arena_, "build() comes first");
  return *arena_;
}

std::uint64_t parameter_checksum(std::span<const float> weights) {
  return cpu_backend().checksums(std::span(&weights, 1))[0];
}

}  // namespace topknot
