#pragma once
// Finding and reading the files of a data set, with messages that name the file and the way to get it.

#include <cstdint>
#include <string>
#include <vector>

namespace topknot {

// The folder among root and root/sub (each of `subs`) that holds one of `names`. Throws UserError where root
// is empty or none does: it names the file looked for and `scripts/fetch-data DATASET --to DIR`.
std::string find_data_folder(const std::string& dataset, const std::string& root,
                             const std::vector<std::string>& subs, const std::vector<std::string>& names);

// The first of `names` that is a file in `folder`, as a path; UserError as above where none is.
std::string find_data_file(const std::string& dataset, const std::string& folder,
                           const std::vector<std::string>& names);

// The whole file. UserError where it cannot be read.
std::vector<std::uint8_t> read_file(const std::string& path);

// The whole content of a gzip file. UserError where it cannot be read, is no gzip file, is cut short, or
// fails its checksum. `hint` ends the message: what to do.
std::vector<std::uint8_t> read_gzip(const std::string& path, const std::string& hint);

// "; `scripts/fetch-data mnist --to DIR` brings a good copy"
std::string fetch_hint(const std::string& dataset, const std::string& folder);

}  // namespace topknot
