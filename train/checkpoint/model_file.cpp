#include "train/checkpoint/model_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "nn/base/check.h"

namespace topknot {
namespace {

// Calls visit(name, shape, parameter, buffer); one of the two pointers is null.
template <class Visit>
void for_each_tensor(const ParameterStore& store, Visit&& visit) {
  using Dimensions = std::vector<std::int64_t>;
  for (const auto& p : store.parameters())
    visit(p->name(), dimensions(p->shape()), p.get(), static_cast<Buffer*>(nullptr));
  for (const auto& b : store.buffers())
    if (!b->recurrent)
      visit(b->name, Dimensions{static_cast<std::int64_t>(b->values.size())},
            static_cast<const Parameter*>(nullptr), b.get());
}

std::vector<std::string> tensor_names(const ParameterStore& store) {
  std::vector<std::string> names;
  for_each_tensor(
      store, [&](const std::string& name, const auto&, const Parameter*, Buffer*) { names.push_back(name); });
  return names;
}

bool matches_name(const std::string& pattern, const std::string& name) {
  for (std::size_t end = name.find('.');; end = name.find('.', end + 1)) {
    if (fnmatch(pattern.c_str(), name.substr(0, end).c_str(), 0) == 0) return true;
    if (end == std::string::npos) return false;
  }
}

// A part of the message: a heading and its lines; "" where there are none.
std::string paragraph(const std::string& heading, const std::vector<std::string>& lines) {
  return lines.empty() ? "" : fmt::format("\n  {}:\n    {}", heading, fmt::join(lines, "\n    "));
}

}  // namespace

std::vector<std::int64_t> dimensions(const Shape& shape) {
  std::vector<std::int64_t> dims;
  for (int i = 0; i < shape.rank(); ++i) dims.push_back(shape[i]);
  return dims;
}

std::vector<TensorView> model_tensors(const ParameterStore& store, const ModelCopy& copy) {
  std::vector<TensorView> tensors;
  std::map<const Buffer*, std::span<const float>> statistics;
  std::size_t at = 0;
  for (const auto& buffer : store.buffers()) {
    statistics[buffer.get()] = std::span(copy.statistics).subspan(at, buffer->values.size());
    at += buffer->values.size();
  }
  for_each_tensor(store, [&](const std::string& name, std::vector<std::int64_t> shape,
                             const Parameter* parameter, Buffer* buffer) {
    const std::span<const float> values =
        parameter ? std::span(copy.weights).subspan(parameter->offset(), parameter->numel())
                  : statistics.at(buffer);
    tensors.push_back({name, "F32", std::move(shape), std::as_bytes(values)});
  });
  return tensors;
}

bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  bool matches = false;
  for (const std::string& pattern : patterns)
    if (const bool except = pattern.starts_with('!'); matches_name(pattern.substr(except), name))
      matches = !except;
  return matches;
}

void check_patterns(const std::string& key, const std::vector<std::string>& patterns,
                    const std::vector<std::string>& names) {
  for (const std::string& pattern : patterns)
    if (std::none_of(names.begin(), names.end(), [&](const std::string& name) {
          return matches_name(pattern.substr(pattern.starts_with('!')), name);
        }))
      throw UserError(
          fmt::format("{}: '{}' matches nothing; there are {}", key, pattern, fmt::join(names, ", ")));
}

void load_model(ParameterStore& store, const SafetensorsFile& file, const std::vector<std::string>& reinit) {
  check_patterns("model.reinit", reinit, tensor_names(store));
  std::vector<std::string> missing, unexpected, other, non_finite;
  std::vector<std::string> known = tensor_names(store);
  for_each_tensor(
      store, [&](const std::string& name, const std::vector<std::int64_t>& shape, const Parameter*, Buffer*) {
        if (matches_any(reinit, name)) return;
        const TensorView* tensor = file.find(name);
        if (!tensor)
          missing.push_back(fmt::format("{} {}", name, shape));
        else if (tensor->shape != shape || tensor->dtype != "F32")
          other.push_back(fmt::format("{}: {} {} in the file, {} F32 in the model", name, tensor->shape,
                                      tensor->dtype, shape));
        else if (std::string text = non_finite_text(*tensor); !text.empty())
          non_finite.push_back(fmt::format("{}: {}", name, text));
      });
  std::sort(known.begin(), known.end());
  for (const TensorView& tensor : file.tensors())
    if (!std::binary_search(known.begin(), known.end(), tensor.name) && !matches_any(reinit, tensor.name))
      unexpected.push_back(fmt::format("{} {}", quoted_text(tensor.name), tensor.shape));
  if (!missing.empty() || !unexpected.empty() || !other.empty())
    throw UserError(fmt::format(
        "{}: its tensors are not those of the model{}{}{}\n  choose the model.name and the data that "
        "it was made for, or let model.reinit name what keeps its initialisation",
        file.where(), paragraph("missing in the file", missing), paragraph("not in the model", unexpected),
        paragraph("of another shape or type", other)));
  if (!non_finite.empty())
    throw UserError(fmt::format(
        "{}: holds no weights that a run can begin with:\n    {}\n  the run that wrote it has diverged; give "
        "another file, or let model.reinit name what keeps its initialisation",
        file.where(), fmt::join(non_finite, "\n    ")));

  store.statistics_to_host();
  std::vector<float> values;  // a view may begin at any byte
  for_each_tensor(store,
                  [&](const std::string& name, const auto&, const Parameter* parameter, Buffer* buffer) {
                    if (matches_any(reinit, name)) return;
                    const TensorView& tensor = *file.find(name);
                    values.resize(tensor.data.size() / sizeof(float));
                    std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
                    if (parameter)
                      backend(store.device()).to_device(parameter->value(), values.data(), values.size());
                    else
                      std::copy(values.begin(), values.end(), buffer->values.begin());
                  });
  store.statistics_to_device();
}

}  // namespace topknot
