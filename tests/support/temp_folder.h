#pragma once
// A folder for a test's files, removed with all that is in it.

#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace topknot {

class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "topknot-data-XXXXXX").string();
    if (!mkdtemp(pattern.data())) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string str() const { return path_.string(); }
  std::string at(const std::string& name) const { return (path_ / name).string(); }
  void write(const std::string& name, const std::vector<std::uint8_t>& content) const {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::ofstream out(path_ / name, std::ios::binary);
    out.write(reinterpret_cast<const char*>(content.data()), static_cast<std::streamsize>(content.size()));
    if (!out) throw std::runtime_error("cannot write " + at(name));
  }

 private:
  std::filesystem::path path_;
};

// The path of a new YAML file of that content.
inline std::string yaml_file(const std::string& text) {
  static const TempFolder folder;
  static int count = 0;
  const std::string name = std::to_string(count++) + ".yaml";
  folder.write(name, {text.begin(), text.end()});
  return folder.at(name);
}

}  // namespace topknot
