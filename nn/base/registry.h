#pragma once
// Names to factories. A file registers what it defines with one static object; registries are filled before
// main and only read afterwards.

#include <map>
#include <string>
#include <vector>

#include "nn/base/check.h"
#include "nn/base/options.h"
#include "nn/base/text.h"

namespace topknot {

// What a registry knows of its entries, whatever it makes of them.
class RegisteredNames {
 public:
  // `kind` names what is registered in messages: "model", "compressor".
  explicit RegisteredNames(std::string kind) : kind_(std::move(kind)) {}

  bool contains(const std::string& name) const { return descriptions_.count(name) != 0; }
  std::vector<std::string> names() const {  // sorted
    std::vector<std::string> result;
    for (const auto& [name, description] : descriptions_) result.push_back(name);
    return result;
  }
  const std::string& help(const std::string& name) const { return descriptions_.at(name).help; }
  // What the entry declares for itself.
  const std::vector<Option>& options(const std::string& name) const { return descriptions_.at(name).options; }

 protected:
  struct Description {
    std::string help;
    std::vector<Option> options;
  };
  std::string kind_;
  std::map<std::string, Description> descriptions_;
};

template <class Factory>
class Registry : public RegisteredNames {
 public:
  using RegisteredNames::RegisteredNames;

  void add(const std::string& name, const std::string& help, Factory factory,
           std::vector<Option> options = {}) {
    TOPKNOT_CHECK(factories_.emplace(name, std::move(factory)).second,
                  kind_ + " '" + name + "' is registered twice");
    descriptions_[name] = {help, std::move(options)};
  }
  // Throws UserError with a suggestion where the name is unknown.
  const Factory& find(const std::string& name) const {
    const auto it = factories_.find(name);
    if (it == factories_.end()) throw UserError(unknown_name_message(kind_, name, names()));
    return it->second;
  }

 private:
  std::map<std::string, Factory> factories_;
};

}  // namespace topknot
