#pragma once
// Which program this is: of the records, messages and checks that must know it.

#include <string>

namespace topknot {

std::string program_version();  // "topknot 0.1.0 (0123abc)"

// Written by the build (cmake/Revision.cmake).
const char* program_number();  // "0.1.0"
// Of the git tree: "0123abc", with changes "0123abc-dirty-89cdef0"; "unknown" without one.
const char* program_revision();

}  // namespace topknot
