#pragma once
// Which parameters travel together. A plan depends on shapes and options alone, so all ranks make the same
// one.

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "compress/compressor.h"
#include "nn/core/parameter.h"

namespace topknot {

// One slice of the arena that travels as one message.
struct Group {
  std::size_t begin = 0, end = 0;  // elements of the arena
  bool compressed = false;         // false: averaged dense
  std::vector<Parameter*> parameters;
  std::size_t numel() const { return end - begin; }
};

// exchange.merge: "none" (each parameter alone), "all" (one group), "size:BYTES" (neighbours together up to
// that many bytes of gradient; a parameter above it stays alone), or a plan that is made from measured times
// (dist/plan/merge_search.h): "mgwfbp", "omgs", "optimal".
struct MergePolicy {
  enum class Kind { none, all, size, planned };
  Kind kind = Kind::all;
  std::size_t bytes = 0;
};

// Throws UserError for anything else.
MergePolicy parse_merge(const std::string& text);

// Throws UserError for an unknown compress.scope.
void check_scope(const std::string& scope);

// Cuts the arena into groups, in arena order and on parameter boundaries, the compressible part and the dense
// part each for itself. `compressing`: false where the method is dense; then the whole arena is one dense
// part. `planned`, parameters a group in arena order, cuts the compressed part (method dense: the whole arena)
// in place of `merge`; the dense part of a compressed method is then one group. Throws UserError for scope
// model, which means one group, with another merge than all, for a planned merge without its plan, and for a
// plan of another number of parameters.
std::vector<Group> plan_groups(const ParameterArena& arena, bool compressing, const std::string& scope,
                               const std::string& merge, const std::vector<std::size_t>& planned = {});

// What the compressor of a group is told: scope tensor selects in each parameter alone, the others in the
// whole group. `layer_density`, by parameter name, needs scope tensor (UserError).
GroupSpec group_spec(const Group& group, const std::string& scope, int ranks,
                     const std::map<std::string, double>& layer_density = {});

}  // namespace topknot
