#pragma once
// Names to factories. A file registers what it defines with one static object; registries are filled before
// main and only read afterwards.

#include <map>
#include <string>
#include <vector>

#include "nn/core/base/check.h"
#include "nn/core/base/suggest.h"

namespace topknot {

template <class Factory>
class Registry {
 public:
  // `kind` names what is registered in messages: "model", "compressor".
  explicit Registry(std::string kind) : kind_(std::move(kind)) {}

  void add(const std::string& name, const std::string& help, Factory factory) {
    TOPKNOT_CHECK(entries_.emplace(name, Entry{help, std::move(factory)}).second,
                  kind_ + " '" + name + "' is registered twice");
  }
  // Throws UserError with a suggestion where the name is unknown.
  const Factory& find(const std::string& name) const {
    const auto it = entries_.find(name);
    if (it == entries_.end()) throw UserError(unknown_name_message(kind_, name, names()));
    return it->second.factory;
  }
  bool contains(const std::string& name) const { return entries_.count(name) != 0; }
  std::vector<std::string> names() const {  // sorted
    std::vector<std::string> result;
    for (const auto& [name, entry] : entries_) result.push_back(name);
    return result;
  }
  const std::string& help(const std::string& name) const { return entries_.at(name).help; }

 private:
  struct Entry {
    std::string help;
    Factory factory;
  };
  std::string kind_;
  std::map<std::string, Entry> entries_;
};

}  // namespace topknot
