#pragma once
// Files that must be regular ones: a named pipe, a device or a socket may never open or end, and a folder has no content.

#include <sys/stat.h>

#include <string>

#include "nn/base/fd.h"

namespace topknot {

// "a folder", "a named pipe", "a socket", "a device"; "" for a regular file.
std::string special_file_kind(const struct stat& status);

// Opens `path` for reading, close-on-exec. UserError "cannot open 'PATH': REASON": it is no regular file (which is seen
// before it is opened), absent, or not permitted.
Fd open_regular_file(const std::string& path);

}  // namespace topknot
