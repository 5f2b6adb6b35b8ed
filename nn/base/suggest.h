#pragma once
// "did you mean": the known name nearest to a wrong one.

#include <string>
#include <vector>

namespace topknot {

// The shortest of `known` that extends `name` or differs in its last number, else the nearest by 2 (or a third) edits, or "".
std::string nearest_name(const std::string& name, const std::vector<std::string>& known);

// "unknown compressor 'top_k'; did you mean 'topk'? known: dense, topk"; for `resnet`: "'resnet20' or 'resnet110'?"
std::string unknown_name_message(const std::string& kind, const std::string& name,
                                 const std::vector<std::string>& known);

}  // namespace topknot
