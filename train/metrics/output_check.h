#pragma once
// What a file that a user names for output may take the place of.

#include <string>

namespace topknot {

enum class Replace {
  nothing,  // no file that is there
  reports,  // a file that is no model, no .npy file and no file of a run directory
  all,      // any file
};

// Throws UserError where `path` lies in the checkpoints of a run, by whatever links and relative names, and where it is a
// file that `replace` does not allow; the message ends with `remedy`. Pipes, devices and "-" pass.
void check_output(const std::string& path, Replace replace, const std::string& remedy);

}  // namespace topknot
