#pragma once
// The frame of every page: one file, no network, no script. It follows the reader's light or dark scheme, stacks its
// figures where it is narrow, and prints on A4.

#include <string>

namespace topknot {

// `title` as plain text, `body` as HTML.
std::string html_page(const std::string& title, const std::string& body);

}  // namespace topknot
