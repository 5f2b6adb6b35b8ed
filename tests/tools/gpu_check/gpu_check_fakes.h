#pragma once
// Programs that behave as those that gpu-check starts: shell scripts in a folder.

#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "tests/support/files.h"
#include "tests/support/temp_folder.h"
#include "tools/gpu_check/stages.h"

namespace topknot::testing {

class Fakes {
 public:
  std::string folder() const { return temp_.str(); }
  std::string path(const std::string& name) const { return temp_.at(name); }
  void write_file(const std::string& name, const std::string& text) const {
    std::ofstream(path(name)) << text;
  }
  // A script that can be run.
  void program(const std::string& name, const std::string& script,
               const std::string& shell = "#!/bin/sh\n") const {
    write_file(name, shell + script);
    std::filesystem::permissions(path(name), std::filesystem::perms::owner_all);
  }
  std::string text_of(const std::string& name) const { return topknot::text_of(path(name)); }
  int number_in(const std::string& name) const {
    int number = 0;
    std::ifstream(path(name)) >> number;
    return number;
  }
  gpu_check::Options options(double seconds) const {
    gpu_check::Options options;
    options.bin = folder();
    options.out = path("out");
    options.python = path("python");
    options.self = path("gpu-check");
    options.sanitizer = path("compute-sanitizer");
    options.seconds = seconds;
    options.smallest = 16, options.largest = 18;
    return options;
  }

 private:
  TempFolder temp_;
};

// Whether there is no such process, soon; a zombie counts as gone.
inline bool gone(int pid) {
  if (pid <= 0) return false;
  for (int i = 0; i < 100; ++i) {
    std::ifstream status("/proc/" + std::to_string(pid) + "/stat");
    std::string number, name, state;
    if (!(status >> number >> name >> state) || state == "Z") return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return false;
}

}  // namespace topknot::testing
