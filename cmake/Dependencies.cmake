# Everything comes from the distribution; scripts/install-deps names the packages, scripts/doctor says what is missing.
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(ZLIB REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(spdlog REQUIRED)
find_package(fmt REQUIRED)

# Some distributions' oneDNN package asks for OpenCL in its CMake file, so header and library are looked up here.
find_path(DNNL_INCLUDE_DIR oneapi/dnnl/dnnl.hpp REQUIRED)
find_library(DNNL_LIBRARY dnnl REQUIRED)
add_library(topknot_dnnl INTERFACE)
target_include_directories(topknot_dnnl SYSTEM INTERFACE ${DNNL_INCLUDE_DIR})
target_link_libraries(topknot_dnnl INTERFACE ${DNNL_LIBRARY})

find_path(GLOO_INCLUDE_DIR gloo/algorithm.h REQUIRED)
find_library(GLOO_LIBRARY gloo REQUIRED)
add_library(topknot_gloo INTERFACE)
target_include_directories(topknot_gloo SYSTEM INTERFACE ${GLOO_INCLUDE_DIR})
target_link_libraries(topknot_gloo INTERFACE ${GLOO_LIBRARY})

find_path(SNDFILE_INCLUDE_DIR sndfile.h REQUIRED)
find_library(SNDFILE_LIBRARY sndfile REQUIRED)
add_library(topknot_sndfile INTERFACE)
target_include_directories(topknot_sndfile SYSTEM INTERFACE ${SNDFILE_INCLUDE_DIR})
target_link_libraries(topknot_sndfile INTERFACE ${SNDFILE_LIBRARY})

find_path(STB_INCLUDE_DIR stb/stb_image.h REQUIRED)
# Another libjpeg than libjpeg-turbo lacks what is used of it.
find_package(JPEG REQUIRED)
include(CheckSymbolExists)
set(CMAKE_REQUIRED_INCLUDES ${JPEG_INCLUDE_DIRS})
check_symbol_exists(LIBJPEG_TURBO_VERSION "stdio.h;jpeglib.h" TOPKNOT_JPEG_TURBO)
unset(CMAKE_REQUIRED_INCLUDES)
if(NOT TOPKNOT_JPEG_TURBO)
  message(FATAL_ERROR "${JPEG_INCLUDE_DIRS}/jpeglib.h is not libjpeg-turbo's (Debian: libjpeg-dev)")
endif()

find_path(NLOHMANN_JSON_INCLUDE_DIR nlohmann/json.hpp REQUIRED)
find_path(CLI11_INCLUDE_DIR CLI/CLI.hpp REQUIRED)
