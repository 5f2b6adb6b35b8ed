#pragma once
// Small text files that a user names: configurations, profiles, tables.

#include <cstddef>
#include <fstream>
#include <string>

namespace topknot {

// The whole content of a regular file, or of a pipe that the shell opened for this program (/dev/stdin,
// /dev/fd/N), which has a minute to deliver it. Throws UserError "PATH: REASON HINT": absent, a read error, a
// folder, a device, a named pipe (opening one may never end), more than `most_bytes`.
std::string read_text_file(const std::string& path, std::size_t most_bytes, const std::string& hint = "");

// A regular file of any size, to be read line by line. Throws UserError as open_regular_file() (nn/base/regular_file.h).
std::ifstream open_stream(const std::string& path);

}  // namespace topknot
