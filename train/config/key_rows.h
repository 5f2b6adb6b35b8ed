#pragma once
// How the table of keys is written: a row is a Key, made by one of these functions and what its row adds.

#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "compress/compressor.h"
#include "train/config/config.h"

namespace topknot::key_rows {

inline constexpr double kNoLimit = 1e300;

using Names = std::vector<std::string>;

// A key, and what else its row says of it.
struct Row : Key {
  Row used_by(Names names) {
    users = std::move(names);
    return *this;
  }
  // Does the same as used_by() and names the users in the help.
  Row of(Names names) {
    help = fmt::format("{}: {}", fmt::join(names, ", "), help);
    return used_by(std::move(names));
  }
  Row not_of(Names names) {
    ignored_by = std::move(names);
    return *this;
  }
  Row or_word(std::string word) {
    none_word = std::move(word);
    return *this;
  }
  Row hidden() {
    secret = true;
    return *this;
  }
  Row on_host() {
    scope = KeyScope::host;
    return *this;
  }
  Row of_start() {
    scope = KeyScope::start;
    return *this;
  }
};

using Place = KeyRef (*)(Config&);

inline Row flag(std::string name, Place place, std::string help) {
  Row row;
  row.name = std::move(name), row.ref = place, row.help = std::move(help);
  return row;
}

inline Row number(std::string name, Place place, double least, double greatest, std::string help) {
  Row row = flag(std::move(name), place, std::move(help));
  row.least = least, row.greatest = greatest;
  return row;
}

inline Row above(std::string name, Place place, double least, double greatest, std::string help) {
  Row row = number(std::move(name), place, least, greatest, std::move(help));
  row.above = true;
  return row;
}

inline Row text(std::string name, Place place, std::string help, Names choices = {}) {
  Row row = flag(std::move(name), place, std::move(help));
  row.choices = std::move(choices);
  return row;
}

inline Row registered(std::string name, Place place, std::string kind, std::string help) {
  Row row = text(std::move(name), place, std::move(help));
  row.registry = std::move(kind);
  return row;
}

inline Row piece(std::string name, Place place, std::string kind, std::string help) {
  Row row = registered(std::move(name), place, std::move(kind), std::move(help));
  row.may_be_empty = true;
  return row;
}

// A key of section compress that libtopknot has too; the default is Config's.
inline Row shared(const std::string& name, Place place) {
  Row row;
  static_cast<Option&>(row) = shared_option(name);
  row.name = "compress." + name, row.standard = {}, row.ref = place;
  return row;
}
inline Row shared_piece(const std::string& name, Place place, std::string kind, const std::string& list) {
  return piece("compress." + name, place, std::move(kind),
               shared_option(name).help + " (train --list " + list + ")");
}

// Choices: the names of a registry, and a word of the key's own.
inline Names with(std::string word, Names names) {
  names.push_back(std::move(word));
  return names;
}

template <auto Section, auto Member>
KeyRef at(Config& config) {
  return &(config.*Section.*Member);
}

}  // namespace topknot::key_rows

namespace topknot {

// Sections exchange, dist, train and those after them; the others stand in config_keys.cpp.
std::vector<Key> machine_keys();

}  // namespace topknot
