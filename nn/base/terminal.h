#pragma once
// Text for a terminal: its width, its colours, and lines that fit.

#include <string>

namespace topknot {

// Columns of this file descriptor's terminal, asked for at each call; 80 if there is none or it does not say.
int terminal_columns(int fd);
bool is_terminal(int fd);

enum class Colour { red = 31, yellow = 33 };
// Bold and in this colour on a terminal; as it is elsewhere, for TERM=dumb, and with NO_COLOR (no-color.org).
std::string coloured(const std::string& text, Colour colour, int fd);

// `text`, one or more lines, with its words broken into lines of at most `width` columns. Further lines begin
// under `indent` spaces. `column`: where the first line begins. Words that are too long stay whole.
std::string wrapped(const std::string& text, int width, int indent = 0, int column = 0);
// A row of two columns: `name`, then `text` from `column` on, under it if the name is longer; a line break.
std::string wrapped_row(const std::string& name, const std::string& text, int column, int width);
// A whole page of help for this width: paragraphs and rows of two columns are broken anew. Indented lines
// without a second column are commands and stay as they are, to be copied.
std::string reflowed(const std::string& page, int width);

}  // namespace topknot
