#include "dist/merge_plan.h"

#include <charconv>

#include "nn/core/check.h"

namespace topknot {

MergePolicy parse_merge(const std::string& text) {
  if (text == "none") return {MergePolicy::Kind::none, 0};
  if (text == "all") return {MergePolicy::Kind::all, 0};
  const std::string prefix = "size:";
  if (text.compare(0, prefix.size(), prefix) == 0) {
    std::size_t bytes = 0;
    const char *begin = text.data() + prefix.size(), *end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(begin, end, bytes);
    if (error == std::errc() && stop == end && bytes > 0) return {MergePolicy::Kind::size, bytes};
  }
  throw UserError(
      "exchange.merge is '" + text +
      "': it must be none, all, or size:BYTES with a whole number above 0, for example size:4194304");
}

void check_scope(const std::string& scope) {
  if (scope == "model" || scope == "group" || scope == "tensor") return;
  throw UserError("compress.scope is '" + scope + "': it must be model, group or tensor");
}

std::vector<Group> plan_groups(const ParameterArena& arena, bool compressing, const std::string& scope,
                               const std::string& merge) {
  const MergePolicy policy = parse_merge(merge);
  check_scope(scope);
  if (compressing && scope == "model" && policy.kind != MergePolicy::Kind::all)
    throw UserError("compress.scope: model selects over one group, but exchange.merge is '" + merge +
                    "': set exchange.merge to all, or compress.scope to group or tensor");
  std::vector<Group> groups;
  for (Parameter* parameter : arena.parameters()) {
    const bool compressed = compressing && parameter->compressible();
    bool joins =
        !groups.empty() && groups.back().compressed == compressed && policy.kind != MergePolicy::Kind::none;
    if (joins && policy.kind == MergePolicy::Kind::size)
      joins = (groups.back().numel() + parameter->numel()) * sizeof(float) <= policy.bytes;
    if (!joins) groups.push_back({parameter->offset(), parameter->offset(), compressed, {}});
    groups.back().end += parameter->numel();
    groups.back().parameters.push_back(parameter);
  }
  return groups;
}

GroupSpec group_spec(const Group& group, const std::string& scope, int ranks,
                     const std::map<std::string, double>& layer_density) {
  if (!layer_density.empty() && scope != "tensor")
    throw UserError(
        "compress.layer_density gives each tensor a density of its own: set compress.scope to tensor");
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

}  // namespace topknot
