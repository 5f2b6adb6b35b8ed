#pragma once
// Published settings, modelled from published constants, beside what their papers claim.

#include <string>

namespace topknot {

// Tables for a terminal; every modelled figure says so, and every claim its source.
std::string papers_text();

}  // namespace topknot
