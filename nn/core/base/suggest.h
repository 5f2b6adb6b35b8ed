#pragma once
// "did you mean": the known name nearest to a wrong one.

#include <string>
#include <vector>

namespace topknot {

// The nearest of `known` within a third of the name's length (at least 2 edits), else "".
std::string nearest_name(const std::string& name, const std::vector<std::string>& known);

// "unknown compressor 'top_k'; did you mean 'topk'? known: dense, topk"
std::string unknown_name_message(const std::string& kind, const std::string& name,
                                 const std::vector<std::string>& known);

}  // namespace topknot
