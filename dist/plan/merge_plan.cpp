#include "dist/plan/merge_plan.h"

#include <charconv>

#include "nn/core/base/check.h"

namespace topknot {

MergePolicy parse_merge(const std::string& text) {
  if (text == "none") return {MergePolicy::Kind::none, 0};
  if (text == "all") return {MergePolicy::Kind::all, 0};
  if (text == "mgwfbp" || text == "omgs" || text == "optimal") return {MergePolicy::Kind::planned, 0};
  const std::string prefix = "size:";
  if (text.compare(0, prefix.size(), prefix) == 0) {
    std::size_t bytes = 0;
    const char *begin = text.data() + prefix.size(), *end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(begin, end, bytes);
    if (error == std::errc() && stop == end && bytes > 0) return {MergePolicy::Kind::size, bytes};
  }
  throw UserError(
      "exchange.merge is '" + text +
      "': it must be none, all, mgwfbp, omgs, optimal, or size:BYTES with a whole number above 0, for "
      "example size:4194304");
}

void check_scope(const std::string& scope) {
  if (scope == "model" || scope == "group" || scope == "tensor") return;
  throw UserError("compress.scope is '" + scope + "': it must be model, group or tensor");
}

namespace {

void check_plan(const ParameterArena& arena, bool compressing, const MergePolicy& policy,
                const std::vector<std::size_t>& planned) {
  if (planned.empty()) {
    if (policy.kind == MergePolicy::Kind::planned)
      throw Error("a merge that is planned from measured times needs its plan");
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
    throw UserError("exchange.groups: the groups hold " + std::to_string(total) + " parameters, but " +
                    std::to_string(parameters) + (compressing ? " are compressed" : " are there") +
                    "; a plan is for one model and one compress.name");
}

}  // namespace

std::vector<Group> plan_groups(const ParameterArena& arena, bool compressing, const std::string& scope,
                               const std::string& merge, const std::vector<std::size_t>& planned) {
  const MergePolicy policy = parse_merge(merge);
  check_scope(scope);
  if (compressing && scope == "model" && (policy.kind != MergePolicy::Kind::all || planned.size() > 1))
    throw UserError("compress.scope: model selects over one group, but exchange.merge is '" + merge +
                    "': set exchange.merge to all, or compress.scope to group or tensor");
  check_plan(arena, compressing, policy, planned);
  std::vector<Group> groups;
  std::size_t plan = 0, taken = 0;  // of the planned group under way
  for (Parameter* parameter : arena.parameters()) {
    const bool compressed = compressing && parameter->compressible();
    bool joins =
        !groups.empty() && groups.back().compressed == compressed && policy.kind != MergePolicy::Kind::none;
    if (!planned.empty() && compressed == compressing) {
      joins = taken > 0;
      if (++taken == planned[plan]) ++plan, taken = 0;
    } else if (joins && policy.kind == MergePolicy::Kind::size) {
      joins = (groups.back().numel() + parameter->numel()) * sizeof(float) <= policy.bytes;
    }
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
