#include "train/checkpoint/run_state.h"

#include <fmt/format.h>

#include <cstring>

#include "nn/core/base/check.h"

namespace topknot {
namespace {

constexpr const char* kResidual = "residual.";
constexpr const char* kStatistics = "statistics.";
constexpr const char* kExchange = "exchange";

std::size_t elements(const ParameterStore& store) {
  std::size_t total = 0;
  for (const auto& parameter : store.parameters()) total += parameter->numel();
  return total;
}

std::vector<std::int64_t> dims(const Shape& shape) {
  std::vector<std::int64_t> dims;
  for (int i = 0; i < shape.rank(); ++i) dims.push_back(shape[i]);
  return dims;
}

template <class V>
TensorView view(std::string name, std::string dtype, std::vector<std::int64_t> shape,
                std::span<const V> values) {
  return {std::move(name), std::move(dtype), std::move(shape), std::as_bytes(values)};
}

// One tensor per parameter of a buffer in arena order.
void add_arena(std::vector<TensorView>& tensors, const ParameterStore& store, const std::string& prefix,
               std::span<const float> values) {
  for (const auto& p : store.parameters())
    tensors.push_back(
        view(prefix + p->name(), "F32", dims(p->shape()), values.subspan(p->offset(), p->numel())));
}

void copy_tensor(const SafetensorsFile& file, const std::string& name, const std::vector<std::int64_t>& shape,
                 std::span<float> to) {
  const TensorView* tensor = file.find(name);
  if (!tensor) throw UserError(fmt::format("the checkpoint lacks '{}'; is it of another model?", name));
  if (tensor->dtype != "F32" || tensor->shape != shape)
    throw UserError(fmt::format("the checkpoint's '{}' is {} [{}], not F32 [{}]; is it of another model?",
                                name, tensor->dtype, fmt::join(tensor->shape, ", "), fmt::join(shape, ", ")));
  if (!to.empty()) std::memcpy(to.data(), tensor->data.data(), to.size_bytes());
}

std::vector<float> read_arena(const SafetensorsFile& file, const ParameterStore& store,
                              const std::string& prefix) {
  std::vector<float> values(elements(store));
  for (const auto& p : store.parameters())
    copy_tensor(file, prefix + p->name(), dims(p->shape()),
                std::span(values).subspan(p->offset(), p->numel()));
  return values;
}

void read_statistics(const SafetensorsFile& file, const ParameterStore& store, const std::string& prefix,
                     std::vector<float>& statistics) {
  statistics.clear();
  for (const auto& buffer : store.buffers()) {
    const std::size_t begin = statistics.size(), size = buffer->values.size();
    statistics.resize(begin + size);
    copy_tensor(file, prefix + buffer->name, {static_cast<std::int64_t>(size)},
                std::span(statistics).subspan(begin));
  }
}

}  // namespace

std::vector<TensorView> optimizer_tensors(const ParameterStore& store, const RunState& state) {
  std::vector<TensorView> tensors;
  for (std::size_t i = 0; i < state.optimizer.size(); ++i)
    add_arena(tensors, store, fmt::format("{}.", i), state.optimizer[i]);
  return tensors;
}

std::vector<TensorView> rank_tensors(const ParameterStore& store, const RunState& state) {
  std::vector<TensorView> tensors;
  if (!state.residual.empty()) add_arena(tensors, store, kResidual, state.residual);
  std::span<const float> statistics = state.model.statistics;
  for (const auto& buffer : store.buffers()) {
    const std::size_t size = buffer->values.size();
    tensors.push_back(
        view(kStatistics + buffer->name, "F32", {static_cast<std::int64_t>(size)}, statistics.first(size)));
    statistics = statistics.subspan(size);
  }
  tensors.push_back(view(kExchange, "U8", {static_cast<std::int64_t>(state.exchange.size())},
                         std::span<const std::byte>(state.exchange)));
  return tensors;
}

void read_model(const ParameterStore& store, const SafetensorsFile& file, RunState& state) {
  state.model.weights = read_arena(file, store, "");
  read_statistics(file, store, "", state.model.statistics);
}

void read_optimizer(const ParameterStore& store, const SafetensorsFile& file, RunState& state) {
  const std::size_t buffers = file.tensors().size() / std::max<std::size_t>(1, store.parameters().size());
  state.optimizer.clear();
  for (std::size_t i = 0; i < buffers; ++i)
    state.optimizer.push_back(read_arena(file, store, fmt::format("{}.", i)));
}

void read_rank(const ParameterStore& store, const SafetensorsFile& file, RunState& state) {
  state.residual.clear();
  if (file.find(kResidual + store.parameters().front()->name()))
    state.residual = read_arena(file, store, kResidual);
  read_statistics(file, store, kStatistics, state.model.statistics);
  const TensorView* exchange = file.find(kExchange);
  if (!exchange) throw UserError(fmt::format("the checkpoint lacks '{}'", kExchange));
  state.exchange.assign(exchange->data.begin(), exchange->data.end());
}

}  // namespace topknot
