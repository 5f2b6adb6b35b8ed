#include "train/checkpoint/run_state.h"

#include <fmt/format.h>

#include <cstring>

#include "nn/base/check.h"

namespace topknot {
namespace {

constexpr const char* kResidual = "residual.";
constexpr const char* kStatistics = "statistics.";
constexpr const char* kExchange = "exchange";

// Parameters, or those of them that are trained: all that optimizer and exchange know.
std::vector<const Parameter*> parameters_of(const ParameterStore& store, bool trained_only) {
  std::vector<const Parameter*> parameters;
  for (const auto& parameter : store.parameters())
    if (parameter->trained() || !trained_only) parameters.push_back(parameter.get());
  return parameters;
}

template <class V>
TensorView view(std::string name, std::string dtype, std::vector<std::int64_t> shape,
                std::span<const V> values) {
  return {std::move(name), std::move(dtype), std::move(shape), std::as_bytes(values)};
}

// One tensor per trained parameter of a buffer in arena order.
void add_arena(std::vector<TensorView>& tensors, const ParameterStore& store, const std::string& prefix,
               std::span<const float> values) {
  for (const Parameter* p : parameters_of(store, true))
    tensors.push_back(
        view(prefix + p->name(), "F32", dimensions(p->shape()), values.subspan(p->offset(), p->numel())));
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

std::vector<float> read_arena(const SafetensorsFile& file, const std::vector<const Parameter*>& parameters,
                              const std::string& prefix) {
  std::size_t total = 0;
  for (const Parameter* p : parameters) total += p->numel();
  std::vector<float> values(total);
  for (const Parameter* p : parameters)
    copy_tensor(file, prefix + p->name(), dimensions(p->shape()),
                std::span(values).subspan(p->offset(), p->numel()));
  return values;
}

// A model's file has no recurrent states: they are 0.
void read_statistics(const SafetensorsFile& file, const ParameterStore& store, const std::string& prefix,
                     bool with_states, std::vector<float>& statistics) {
  statistics.clear();
  for (const auto& buffer : store.buffers()) {
    const std::size_t begin = statistics.size(), size = buffer->values.size();
    statistics.resize(begin + size);
    if (buffer->recurrent && !with_states) continue;
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
  state.model.weights = read_arena(file, parameters_of(store, false), "");
  read_statistics(file, store, "", false, state.model.statistics);
}

void read_optimizer(const ParameterStore& store, const SafetensorsFile& file, RunState& state) {
  const std::vector<const Parameter*> trained = parameters_of(store, true);
  const std::size_t buffers = file.tensors().size() / trained.size();
  state.optimizer.clear();
  for (std::size_t i = 0; i < buffers; ++i)
    state.optimizer.push_back(read_arena(file, trained, fmt::format("{}.", i)));
}

void read_rank(const ParameterStore& store, const SafetensorsFile& file, RunState& state) {
  state.residual.clear();
  const std::vector<const Parameter*> trained = parameters_of(store, true);
  if (file.find(kResidual + trained.front()->name())) state.residual = read_arena(file, trained, kResidual);
  read_statistics(file, store, kStatistics, true, state.model.statistics);
  const TensorView* exchange = file.find(kExchange);
  if (!exchange) throw UserError(fmt::format("the checkpoint lacks '{}'", kExchange));
  state.exchange.assign(exchange->data.begin(), exchange->data.end());
}

}  // namespace topknot
