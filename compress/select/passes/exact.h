#pragma once
// Exact selection of the k largest magnitudes, ties to the lower index.

#include <span>

#include "compress/select/passes/passes.h"
#include "compress/select/selector.h"

namespace topknot {

// From a list that holds at least k entries and is known to hold the k largest. `above` is the bound the list
// was collected with. Returns the k-th key; `selected` gets indices and values.
template <class T>
Key<T> select_from(const Candidates<T>& found, Key<T> above, std::size_t k, Selected<T>& selected);

// From the whole vector, 1 <= k <= n, all finite: radix selection, 11 bits a pass, until few enough entries
// are left to list. `found` is scratch.
template <class T>
Key<T> select_exact(std::span<const T> u, std::size_t k, Candidates<T>& found, Selected<T>& selected);

}  // namespace topknot
