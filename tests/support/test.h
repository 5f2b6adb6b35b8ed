#pragma once
// What nearly every test includes: Catch2, the standard library, and helpers for texts, errors, files and folders.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <thread>
#include <tuple>
#include <utility>

#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/files.h"
#include "tests/support/temp_folder.h"

namespace topknot {
namespace fs = std::filesystem;
}
