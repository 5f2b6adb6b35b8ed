// The effective configuration as text.

#include "train/config/config.h"
#include "train/config/config_text.h"

namespace topknot {
std::string dump_yaml(const Config& config, bool only_non_default,
                      const std::map<std::string, Origin>& origins, const std::set<std::string>& without) {
  const Config defaults;
  std::string text, section;
  for (const Key& key : config_keys()) {
    const std::string value = key_value(key, config);
    if ((only_non_default && value == key_value(key, defaults)) || without.count(key.name)) continue;
    const std::string own = section_of(key.name);
    if (own != section) text += "\n" + own + ":\n";
    section = own;
    text += own.empty() ? key.name : "  " + key.name.substr(own.size() + 1);
    const bool hidden = key.secret && value != kEmptyText;
    text += ": " + (hidden ? kEmptyText : value);
    if (const auto it = origins.find(key.name); it != origins.end() && it->second != Origin::default_value)
      text += std::string("  # ") + origin_name(it->second) +
              (hidden ? "; the value is not written, give it again where the ranks need it" : "");
    text += "\n";
  }
  return text;
}

}  // namespace topknot
