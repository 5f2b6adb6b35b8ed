#pragma once
// The keys that belong to sparse methods, for a method that has no such pieces.

#include <string>

#include "compress/compressor.h"

namespace topknot {

// Throws UserError naming the key and the reason where `options` give a selection, code, value codec, capacity
// or lr_inside, or a memory other than residual and none. `sends` ends the sentence "NAME sends ...", for
// example "two factors of each matrix". A value codec of fp32 passes where `sums` is true: sums are that. (dense looks after bf16 itself.)
void refuse_pieces(const CompressOptions& options, const std::string& sends, bool sums);

// Refuses one value of a key of section compress.
[[noreturn]] void refuse_key(const CompressOptions& options, const std::string& key, const std::string& value,
                             const std::string& reason);

}  // namespace topknot
