#include "train/checkpoint/model_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "nn/base/check.h"

namespace topknot {
namespace {

// "{}" stands for a layer's number.
struct Row {
  std::string_view ours;
  std::vector<std::string_view> theirs;  // several: their rows one below the other; none: left out
  bool conv1d = false;                   // [in, out] in the file
};
struct Family {
  std::string_view prefix;
  std::string_view sign;  // a name without prefix that no other family has
  std::vector<Row> rows;
};

const std::vector<Family>& families() {
  static const std::vector<Family> all = {
      {"transformer.",
       "wte.weight",
       {{"h.{}.attn.c_attn.weight", {"h.{}.attn.c_attn.weight"}, true},
        {"h.{}.attn.c_proj.weight", {"h.{}.attn.c_proj.weight"}, true},
        {"h.{}.mlp.c_fc.weight", {"h.{}.mlp.c_fc.weight"}, true},
        {"h.{}.mlp.c_proj.weight", {"h.{}.mlp.c_proj.weight"}, true}}},
      {"model.",
       "embed_tokens.weight",
       {{"layers.{}.self_attn.qkv_proj.weight",
         {"layers.{}.self_attn.q_proj.weight", "layers.{}.self_attn.k_proj.weight",
          "layers.{}.self_attn.v_proj.weight"}},
        {"layers.{}.mlp.gate_up_proj.weight",
         {"layers.{}.mlp.gate_proj.weight", "layers.{}.mlp.up_proj.weight"}}}}};
  return all;
}
constexpr std::string_view kLeftOut[] = {"h.{}.attn.bias", "h.{}.attn.masked_bias",
                                         "layers.{}.self_attn.rotary_emb.inv_freq"};
// Parts of names that wrappers add: within them, and before them.
constexpr std::string_view kWrappers[] = {"_orig_mod.", "_fsdp_wrapped_module.",
                                          "_checkpoint_wrapped_module.", "_forward_module."};
constexpr std::string_view kOuterWrappers[] = {"module.", "model."};
constexpr std::string_view kHead = "lm_head.weight";  // never has a prefix

// Whether the name has the pattern; `number`: what stands for "{}".
bool matches(std::string_view pattern, std::string_view name, std::string& number) {
  const std::size_t at = pattern.find("{}");
  if (at == std::string_view::npos) return pattern == name;
  const std::string_view before = pattern.substr(0, at), after = pattern.substr(at + 2);
  if (name.size() <= before.size() + after.size() || !name.starts_with(before) || !name.ends_with(after))
    return false;
  const std::string_view between = name.substr(before.size(), name.size() - before.size() - after.size());
  if (between.find_first_not_of("0123456789") != std::string_view::npos) return false;
  number = between;
  return true;
}

std::string numbered(std::string_view pattern, const std::string& number) {
  const std::size_t at = pattern.find("{}");
  if (at == std::string_view::npos) return std::string(pattern);
  return fmt::format("{}{}{}", pattern.substr(0, at), number, pattern.substr(at + 2));
}

std::string_view without_prefix(const Family& family, std::string_view name) {
  return name.starts_with(family.prefix) ? name.substr(family.prefix.size()) : name;
}

// Null: no family's.
const Family* family_of(std::span<const TensorView> tensors) {
  for (const Family& family : families())
    for (const TensorView& tensor : tensors)
      if (without_prefix(family, tensor.name) == family.sign) return &family;
  return nullptr;
}

bool is_conv1d(const TensorView& c_attn) {
  return c_attn.shape.size() == 2 && c_attn.shape[1] == 3 * c_attn.shape[0];
}

// Makes `bytes` the tensor's data and keeps them.
void keep(NamedTensors& result, TensorView& tensor, std::vector<std::byte> bytes) {
  tensor.data = result.memory.emplace_back(std::move(bytes));
}

void widen(NamedTensors& result, TensorView& tensor) {
  if (tensor.dtype != "BF16") return;
  std::vector<std::byte> bytes(2 * tensor.data.size());
  for (std::size_t i = 0; i < tensor.data.size(); i += 2)
    std::memcpy(bytes.data() + 2 * i + 2, tensor.data.data() + i, 2);  // little-endian: the upper half
  tensor.dtype = "F32";
  keep(result, tensor, std::move(bytes));
}

// [rows, columns] of 4 bytes -> [columns, rows]. In tiles, so that both sides stay in the cache.
void transpose(NamedTensors& result, TensorView& tensor) {
  if (tensor.shape.size() != 2 || dtype_bytes(tensor.dtype) != 4) return;  // load_model() says what is wrong
  const auto rows = static_cast<std::size_t>(tensor.shape[0]),
             columns = static_cast<std::size_t>(tensor.shape[1]);
  constexpr std::size_t kTile = 32, kBytes = 4;
  std::vector<std::byte> bytes(tensor.data.size());
  for (std::size_t r = 0; r < rows; r += kTile)
    for (std::size_t c = 0; c < columns; c += kTile)
      for (std::size_t i = r; i < std::min(rows, r + kTile); ++i)
        for (std::size_t j = c; j < std::min(columns, c + kTile); ++j)
          std::memcpy(bytes.data() + kBytes * (j * rows + i), tensor.data.data() + kBytes * (i * columns + j),
                      kBytes);
  std::swap(tensor.shape[0], tensor.shape[1]);
  keep(result, tensor, std::move(bytes));
}

// Matrices of one type and as many columns, one below the other. False if they are not.
bool stack(NamedTensors& result, std::span<const TensorView> parts, TensorView& whole) {
  std::vector<std::byte> bytes;
  whole.dtype = parts[0].dtype, whole.shape = parts[0].shape;
  if (whole.shape.size() != 2) return false;
  whole.shape[0] = 0;
  for (const TensorView& part : parts) {
    if (part.dtype != whole.dtype || part.shape.size() != 2 || part.shape[1] != whole.shape[1]) return false;
    whole.shape[0] += part.shape[0];
    bytes.insert(bytes.end(), part.data.begin(), part.data.end());
  }
  keep(result, whole, std::move(bytes));
  return true;
}

// Rows of a matrix's parts: gate, up: half; queries as many as columns, keys, values half of the rest.
std::vector<std::int64_t> part_rows(const TensorView& whole, std::size_t parts) {
  const std::int64_t first = parts == 3 ? whole.shape[1] : whole.shape[0] / 2;
  std::vector<std::int64_t> rows(parts, (whole.shape[0] - first) / static_cast<std::int64_t>(parts - 1));
  rows[0] = first;
  return rows;
}

// A field of config.json, and what it is if the file does not have it ("": nothing is said).
struct ConfigField {
  const char* theirs;
  const char* key;
  const char* standard;
};
constexpr ConfigField kGptFields[] = {
    {"n_layer", "model.layers", ""},       {"n_embd", "model.width", ""},
    {"n_head", "model.heads", "12"},       {"n_positions", "model.context", ""},
    {"n_inner", "model.feed_forward", ""}, {"layer_norm_epsilon", "model.norm_epsilon", "1e-05"}};
constexpr ConfigField kLlamaFields[] = {
    {"num_hidden_layers", "model.layers", ""},        {"hidden_size", "model.width", ""},
    {"num_attention_heads", "model.heads", "32"},     {"num_key_value_heads", "model.kv_heads", "0"},
    {"max_position_embeddings", "model.context", ""}, {"intermediate_size", "model.feed_forward", ""},
    {"rms_norm_eps", "model.norm_epsilon", "1e-06"},  {"rope_theta", "model.rope_base", "10000"},
    {"tie_word_embeddings", "model.tied", "false"}};

}  // namespace

std::map<std::string, std::string> keys_from_hugging_face(const std::string& text, const std::string& where) {
  using Json = nlohmann::json;
  const auto shallow = [](int depth, Json::parse_event_t, const Json&) { return depth < 8; };
  const Json config = Json::parse(text, shallow, false);
  if (!config.is_object())
    throw UserError(where + ": is no JSON object; fetch it again, or move it away from the weights");
  // "" for what is absent or null.
  const auto field = [](const Json& of, const char* name) -> std::string {
    const auto at = of.is_object() ? of.find(name) : of.end();
    if (at == of.end() || at->is_null()) return "";
    return at->is_string() ? at->get<std::string>() : at->dump(-1, ' ', true, Json::error_handler_t::replace);
  };
  const auto only = [&](const char* name, const std::string& value,
                        std::initializer_list<const char*> taken) {
    if (!value.empty() && std::ranges::count(taken, value) == 0)
      throw UserError(fmt::format("{}: {} is {}, which Topknot's models do not compute; choose other weights",
                                  where, name, quoted_text(value)));
  };
  const std::string type = field(config, "model_type");
  const bool gpt = type == "gpt2";
  if (!gpt && type != "llama" && type != "mistral")
    throw UserError(
        fmt::format("{}: model_type is {}; gpt is of gpt2, and llama of llama or mistral; if the "
                    "file is not of these weights, move it away from them",
                    where, quoted_text(type)));

  std::map<std::string, std::string> keys{{"model.name", gpt ? "gpt" : "llama"}};
  const auto take = [&](std::span<const ConfigField> fields) {
    for (const ConfigField& of : fields) {
      const std::string value = field(config, of.theirs);
      if (const std::string given = value.empty() ? of.standard : value; !given.empty()) keys[of.key] = given;
    }
  };
  if (gpt) {
    take(kGptFields);
    const std::string activation = field(config, "activation_function");
    only("activation_function", activation,
         {"gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu", "gelu_python"});
    keys["model.gelu"] = activation == "gelu" || activation == "gelu_python" ? "exact" : "tanh";
    only("scale_attn_weights", field(config, "scale_attn_weights"), {"true"});
    only("scale_attn_by_inverse_layer_idx", field(config, "scale_attn_by_inverse_layer_idx"), {"false"});
    return keys;
  }
  take(kLlamaFields);
  only("hidden_act", field(config, "hidden_act"), {"silu", "swish"});
  only("partial_rotary_factor", field(config, "partial_rotary_factor"), {"1", "1.0"});
  for (const char* name : {"rope_scaling", "rope_parameters"}) {  // the latter since transformers 5
    const Json rope = config.value(name, Json());
    for (const char* kind : {"type", "rope_type"}) only(name, field(rope, kind), {"default"});
    if (const std::string theta = field(rope, "rope_theta"); !theta.empty()) keys["model.rope_base"] = theta;
  }
  // Up to there a sliding window changes nothing.
  const Json window = config.value("sliding_window", Json()),
             most = config.value("max_position_embeddings", Json());
  if (window.is_number() && !(most.is_number() && most < window)) keys["model.context"] = window.dump();
  return keys;
}

std::vector<TensorView> without_wrappers(std::span<const TensorView> tensors,
                                         std::span<const std::string> known) {
  std::vector<TensorView> result(tensors.begin(), tensors.end());
  std::set<std::string> taken;
  for (const TensorView& tensor : tensors) taken.insert(tensor.name);
  for (TensorView& tensor : result) {
    if (std::ranges::binary_search(known, tensor.name)) continue;
    std::string name = "." + tensor.name;
    for (const std::string_view part : kWrappers)
      for (std::size_t at; (at = name.find(fmt::format(".{}", part))) != name.npos;)
        name.erase(at + 1, part.size());
    name.erase(0, 1);
    const auto outer = [&] {
      return std::ranges::find_if(kOuterWrappers,
                                  [&](std::string_view part) { return name.starts_with(part); });
    };
    for (auto part = outer(); part != std::end(kOuterWrappers); part = outer()) name.erase(0, part->size());
    if (taken.insert(name).second) tensor.name = name;
  }
  return result;
}

NamedTensors from_hugging_face(std::span<const TensorView> tensors) {
  NamedTensors result;
  result.tensors.assign(tensors.begin(), tensors.end());
  const Family* family = family_of(tensors);
  if (!family) return result;
  std::string number;
  std::map<std::string, TensorView> named;  // by names without prefix
  std::vector<std::string> order;
  for (TensorView tensor : tensors) {
    tensor.name = std::string(without_prefix(*family, tensor.name));
    if (std::any_of(std::begin(kLeftOut), std::end(kLeftOut),
                    [&](std::string_view pattern) { return matches(pattern, tensor.name, number); }))
      continue;
    widen(result, tensor);
    // A file with a name twice, with and without the prefix, keeps both: the model refuses the second.
    if (named.contains(tensor.name)) tensor.name = fmt::format("{}{}", family->prefix, tensor.name);
    order.push_back(tensor.name);
    named[tensor.name] = tensor;
  }
  // A tensor that the file splits into several is joined in the place of the first.
  for (std::string& name : order)
    for (const Row& row : family->rows) {
      if (row.theirs.size() < 2 || !matches(row.theirs[0], name, number)) continue;
      std::vector<TensorView> parts;
      for (const std::string_view part : row.theirs)
        if (const auto found = named.find(numbered(part, number)); found != named.end())
          parts.push_back(found->second);
      TensorView whole;
      whole.name = numbered(row.ours, number);
      if (parts.size() != row.theirs.size() || !stack(result, parts, whole)) break;  // listed as they are
      for (const TensorView& part : parts) named.erase(part.name);
      name = whole.name;
      named[name] = whole;
      break;
    }

  const auto c_attn = named.find("h.0.attn.c_attn.weight");
  const bool conv1d = c_attn != named.end() && is_conv1d(c_attn->second);
  const auto head = named.find(std::string(kHead)), wte = named.find("wte.weight");
  if (head != named.end() && wte != named.end() && std::ranges::equal(head->second.data, wte->second.data))
    named.erase(head);
  result.tensors.clear();
  for (const std::string& name : order) {
    const auto at = named.find(name);
    if (at == named.end()) continue;  // part of another one, or there already
    TensorView tensor = at->second;
    for (const Row& row : family->rows)
      if (row.conv1d && conv1d && matches(row.ours, name, number)) transpose(result, tensor);
    result.tensors.push_back(std::move(tensor));
  }
  return result;
}

NamedTensors to_hugging_face(std::span<const TensorView> tensors) {
  const Family* family = family_of(tensors);
  if (!family)
    throw UserError(
        "--names huggingface: is for the models gpt and llama; leave it out, and use scripts/convert-pth");
  NamedTensors result;
  std::string number;
  for (TensorView tensor : tensors) {
    const auto row = std::find_if(family->rows.begin(), family->rows.end(),
                                  [&](const Row& of) { return matches(of.ours, tensor.name, number); });
    std::vector<TensorView> parts{tensor};
    if (row != family->rows.end() && row->conv1d) transpose(result, parts[0]);
    if (row != family->rows.end() && row->theirs.size() > 1) {
      parts.clear();
      const std::size_t row_bytes = tensor.data.size() / static_cast<std::size_t>(tensor.shape[0]);
      std::size_t first = 0;
      const std::vector<std::int64_t> rows = part_rows(tensor, row->theirs.size());
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const auto count = static_cast<std::size_t>(rows[i]);
        parts.push_back({numbered(row->theirs[i], number),
                         tensor.dtype,
                         {rows[i], tensor.shape[1]},
                         tensor.data.subspan(first * row_bytes, count * row_bytes)});
        first += count;
      }
    }
    for (TensorView& part : parts) {
      if (part.name != kHead) part.name = fmt::format("{}{}", family->prefix, part.name);
      result.tensors.push_back(std::move(part));
    }
  }
  return result;
}

}  // namespace topknot
