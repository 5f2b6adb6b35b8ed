#pragma once
// Which parameters are sent together: the rules of exchange.merge, and the groups that they make. Groups
// follow from shapes, options and, for a planning rule, rank 0's plan, so that all ranks have the same ones.

#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "compress/compressor.h"
#include "dist/plan/schedule.h"
#include "nn/base/registry.h"
#include "nn/core/parameter.h"

namespace topknot {

// One slice of the arena that is sent as one message.
struct Group {
  std::size_t begin = 0, end = 0;  // elements of the arena
  bool compressed = false;         // false: averaged dense
  int fragment = 0;                // of in_fragments()
  std::vector<Parameter*> parameters;
  std::size_t numel() const { return end - begin; }
};
// Neighbours in the arena, at least one, as one group.
Group group_of(std::span<Parameter* const> parameters, bool compressed);

// Times that a planning rule uses (dist/plan/schedule.h).
struct MergeCosts {
  CostModel model;
  double startup = 0;     // seconds of a collective of no bytes
  bool overlaps = false;  // collectives run during the backward pass; else they delay it
};

// A rule of exchange.merge. It cuts a row of parameters, in order of sending, into groups of neighbours and
// returns how many parameters each group has. Exactly one of the functions is given. A rule registers itself.
struct MergeRule {
  // From sizes: bytes of each parameter's gradient. `limit`: of the rule's text, 0 if it takes none.
  std::function<std::vector<std::size_t>(std::span<const std::size_t> bytes, std::size_t limit)> cut = {};
  std::function<std::vector<std::size_t>(std::span<const LayerCost> layers, const MergeCosts& costs)> plan =
      {};
  // The best rule for a method. `compressing`: false under method dense; `scope`: compress.scope.
  std::function<std::string(bool compressing, const std::string& scope)> choose = {};
  // Not empty: the rule is written NAME:LIMIT with a whole number above 0; the placeholder that help shows.
  std::string limit = {};
};
Registry<MergeRule>& merge_rules();

// The rules as help lists them: "none", "size:BYTES", ...
std::vector<std::string> merge_forms();

// exchange.merge as written, with its rule.
struct Merge {
  std::string name;
  const MergeRule* rule = nullptr;
  std::size_t limit = 0;
  bool planned() const { return static_cast<bool>(rule->plan); }
};
// Throws UserError for an unknown rule or a limit that is no number.
Merge parse_merge(const std::string& text);
// `auto` by the rule that it names; other texts as they are.
std::string resolve_merge(const std::string& text, bool compressing, const std::string& scope);

// Throws UserError for an unknown compress.scope, and for `model` with a merge that makes several groups.
void check_scope(const std::string& scope, const std::string& merge);
// Throws UserError if compress.layer_density does not go with the scope.
void check_layer_density(const std::string& scope);

// Cuts the arena into groups, in arena order and on parameter boundaries, the compressible part and the dense
// part each for itself. `compressing`: false if the method is dense; then the whole arena is one dense part.
// `planned`, parameters per group in arena order, cuts the compressed part (method dense: the whole arena) in
// place of `merge`; the dense part is cut by `merge`, or is one group where `merge` plans. Throws UserError
// for scope model, which means one group, with another merge than all, and for a plan of another number of
// parameters; Error for a planning merge without its plan.
std::vector<Group> cut_groups(const ParameterArena& arena, bool compressing, const std::string& scope,
                              const std::string& merge, const std::vector<std::size_t>& planned = {});

// The same groups, cut where the fragment changes, those of fragment 0 first. Fragment f has layers f, f + fragments, ...
// in the order of sending (strided, in Streaming DiLoCo's words, arXiv 2501.18512); a layer's parameters share the first
// two parts of their names, as h.0. Throws UserError for more fragments than layers.
std::vector<Group> in_fragments(const std::vector<Group>& groups, int fragments);

// The input of a group's compressor: scope tensor selects in each parameter alone, the others in the
// whole group. `layer_density`, by parameter name, needs scope tensor (UserError).
GroupSpec group_spec(const Group& group, const std::string& scope, int ranks,
                     const std::map<std::string, double>& layer_density = {});
// The same of the group's elements [begin, end) alone: its segments, cut, as one vector.
GroupSpec part_of(const GroupSpec& group, std::size_t begin, std::size_t end);

}  // namespace topknot
