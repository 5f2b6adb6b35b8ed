#include "dist/plan/merge_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "nn/base/check.h"

namespace topknot {

Registry<MergeRule>& merge_rules() {
  static Registry<MergeRule> registry("merge rule (exchange.merge)");
  return registry;
}

std::vector<std::string> merge_forms() {
  std::vector<std::string> forms = merge_rules().names();
  for (std::string& form : forms)
    if (const std::string& limit = merge_rules().find(form).limit; !limit.empty()) form += ":" + limit;
  return forms;
}

Merge parse_merge(const std::string& text) {
  Merge merge;
  const std::size_t colon = text.find(':');
  merge.name = text.substr(0, colon);
  bool fits = merge_rules().contains(merge.name);
  if (fits) {
    merge.rule = &merge_rules().find(merge.name);
    fits = (colon == std::string::npos) == merge.rule->limit.empty();
  }
  if (fits && colon != std::string::npos) {
    const char *begin = text.data() + colon + 1, *end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(begin, end, merge.limit);
    fits = error == std::errc() && stop == end && merge.limit > 0;
  }
  if (!fits)
    throw UserError(fmt::format(
        "exchange.merge is '{}': it must be one of {}, a limit being a whole number above 0, for example "
        "size:4194304",
        text, fmt::join(merge_forms(), ", ")));
  return merge;
}

std::string resolve_merge(const std::string& text, bool compressing, const std::string& scope) {
  const Merge merge = parse_merge(text);
  return merge.rule->choose ? merge.rule->choose(compressing, scope) : text;
}

void check_scope(const std::string& scope, const std::string& merge) {
  if (scope != "model" && scope != "group" && scope != "tensor")
    throw UserError("compress.scope is '" + scope + "': it must be model, group or tensor");
  if (scope == "model" && merge != "all" && merge != "auto")
    throw UserError(
        "compress.scope: 'model' selects over the whole gradient at once, so exchange.merge must be 'all' or "
        "'auto', not '" +
        merge + "'; use compress.scope=group to keep that merge");
}

void check_layer_density(const std::string& scope) {
  if (scope != "tensor")
    throw UserError(
        "compress.layer_density: gives each tensor a density of its own, so compress.scope must be 'tensor'");
}

namespace {

// Neighbours together while the group stays within its limit; a parameter above it stays alone.
std::vector<std::size_t> cut_at(std::span<const std::size_t> bytes, std::size_t first_limit,
                                std::size_t limit) {
  std::vector<std::size_t> groups;
  std::size_t sum = 0;  // bytes of the last group
  for (const std::size_t more : bytes) {
    const bool joins = !groups.empty() && sum + more <= (groups.size() == 1 ? first_limit : limit);
    if (joins)
      ++groups.back(), sum += more;
    else
      groups.push_back(1), sum = more;
  }
  return groups;
}

// PyTorch's DistributedDataParallel: the first bucket is small, so that communication starts early (Li et
// al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 4.2).
constexpr std::size_t kFirstBucket = std::size_t{1} << 20, kBucket = std::size_t{25} << 20;

using Bytes = std::span<const std::size_t>;
const bool merge_plan_registered[] = {
    merge_rules().add("none", "each parameter alone",
                      {.cut = [](Bytes bytes, std::size_t) { return cut_at(bytes, 0, 0); }}),
    merge_rules().add(
        "all", "one group",
        {.cut = [](Bytes bytes, std::size_t) { return std::vector<std::size_t>{bytes.size()}; }}),
    merge_rules().add("size", "neighbours together, up to BYTES of gradient: size:BYTES",
                      {.cut = [](Bytes bytes, std::size_t limit) { return cut_at(bytes, limit, limit); },
                       .limit = "BYTES"}),
    merge_rules().add(
        "buckets", "neighbours together, up to 1 MiB of gradient in the first group and 25 MiB in the others",
        {.cut = [](Bytes bytes, std::size_t) { return cut_at(bytes, kFirstBucket, kBucket); }}),
    // Groups are sent during the backward pass; one group waits for its end. Modelled steps are shorter with
    // buckets for dense, sparse and quantised methods alike (docs/exchange.md).
    merge_rules().add("auto", "buckets; all where compress.scope is model",
                      {.choose = [](bool compressing, const std::string& scope) -> std::string {
                        return compressing && scope == "model" ? "all" : "buckets";
                      }})};

void check_plan(const ParameterArena& arena, bool compressing, bool plans,
                const std::vector<std::size_t>& planned) {
  if (planned.empty()) {
    if (plans) throw Error("a merge that is planned from measured times needs its plan");
    return;
  }
  std::size_t parameters = 0, total = 0;
  for (const Parameter* parameter : arena.parameters())
    parameters += compressing == (compressing && parameter->compressible());
  for (const std::size_t count : planned) {
    if (count == 0) throw UserError("exchange.groups: a group of 0 parameters");
    total += count;
  }
  if (total != parameters)
    throw UserError(
        fmt::format("exchange.groups: the groups hold {} parameters, but {} are {}; a plan is for one model "
                    "and one compress.name",
                    total, parameters, compressing ? "compressed" : "there"));
}

}  // namespace

Group group_of(std::span<Parameter* const> parameters, bool compressed) {
  const std::size_t begin = parameters.front()->offset();
  Group group{begin, begin, compressed, 0, {parameters.begin(), parameters.end()}};
  for (const Parameter* parameter : parameters) group.end += parameter->numel();
  return group;
}

std::vector<Group> cut_groups(const ParameterArena& arena, bool compressing, const std::string& scope,
                              const std::string& merge, const std::vector<std::size_t>& planned) {
  const Merge resolved = parse_merge(resolve_merge(merge, compressing, scope));
  check_scope(scope, compressing ? merge : "all");  // dense has no scope
  if (compressing && scope == "model" && planned.size() > 1)
    throw UserError("compress.scope: model selects over one group, but exchange.merge is '" + merge +
                    "': set exchange.merge to all, or compress.scope to group or tensor");
  check_plan(arena, compressing, resolved.planned(), planned);
  std::vector<Group> groups;
  const auto parameters = arena.parameters();
  std::size_t next = 0;
  while (next < parameters.size()) {
    const bool compressed = compressing && parameters[next]->compressible();
    std::vector<std::size_t> bytes;  // of this part's parameters
    for (std::size_t i = next;
         i < parameters.size() && (compressing && parameters[i]->compressible()) == compressed; ++i)
      bytes.push_back(parameters[i]->numel() * sizeof(float));
    std::vector<std::size_t> counts{bytes.size()};
    if (!planned.empty() && compressed == compressing)
      counts = planned;
    else if (resolved.rule->cut)
      counts = resolved.rule->cut(bytes, resolved.limit);
    for (const std::size_t count : counts) {
      groups.push_back(group_of(parameters.subspan(next, count), compressed));
      next += count;
    }
  }
  return groups;
}

std::vector<Group> in_fragments(const std::vector<Group>& groups, int fragments) {
  const auto layer_of = [](const Parameter& parameter) {
    const std::string& name = parameter.name();
    const std::size_t first = name.find('.');
    return name.substr(0, first == name.rfind('.') ? first : name.find('.', first + 1));
  };
  std::map<std::string, int> layers;  // in the order of sending
  for (const Group& group : groups)
    for (const Parameter* parameter : group.parameters)
      layers.emplace(layer_of(*parameter), static_cast<int>(layers.size()));
  const int count = static_cast<int>(layers.size());
  if (fragments > std::max(count, 1))
    throw UserError(
        fmt::format("exchange.fragments: {} fragments of a model of {} layers", fragments, count));
  std::vector<Group> cut;
  for (const Group& group : groups)
    for (Parameter* const parameter : group.parameters) {
      const int fragment = layers[layer_of(*parameter)] % fragments;
      if (cut.empty() || parameter == group.parameters.front() || cut.back().fragment != fragment)
        cut.push_back({parameter->offset(), parameter->offset(), group.compressed, fragment, {}});
      cut.back().end += parameter->numel();
      cut.back().parameters.push_back(parameter);
    }
  std::ranges::stable_sort(cut, {}, &Group::fragment);
  return cut;
}

GroupSpec group_spec(const Group& group, const std::string& scope, int ranks,
                     const std::map<std::string, double>& layer_density) {
  if (!layer_density.empty()) check_layer_density(scope);
  GroupSpec spec;
  spec.numel = group.numel();
  spec.ranks = ranks;
  spec.offset = group.begin;
  for (const Parameter* parameter : group.parameters) {
    const std::size_t rows =
        parameter->shape().rank() > 1 ? static_cast<std::size_t>(parameter->shape()[0]) : parameter->numel();
    spec.tensors.push_back({parameter->offset() - group.begin, rows, rows ? parameter->numel() / rows : 1});
    if (!layer_density.empty() && group.compressed) {
      const auto own = layer_density.find(parameter->name());
      spec.densities.push_back(own == layer_density.end() ? 0.0 : own->second);
    }
  }
  if (scope == "tensor" && group.compressed) {
    for (const Parameter* parameter : group.parameters) {
      const std::size_t begin = parameter->offset() - group.begin;
      spec.segments.emplace_back(begin, begin + parameter->numel());
    }
  } else {
    spec.segments.emplace_back(0, group.numel());
  }
  return spec;
}

GroupSpec part_of(const GroupSpec& group, std::size_t begin, std::size_t end) {
  if (end - begin == group.numel) return group;
  GroupSpec part;
  part.numel = end - begin;
  part.ranks = group.ranks;
  part.offset = group.offset + begin;
  for (std::size_t s = 0; s < group.segments.size(); ++s) {
    const std::size_t from = std::max(begin, group.segments[s].first);
    const std::size_t to = std::min(end, group.segments[s].second);
    if (from >= to) continue;
    part.segments.emplace_back(from - begin, to - begin);
    if (!group.densities.empty()) part.densities.push_back(group.densities[s]);
  }
  return part;
}

}  // namespace topknot
