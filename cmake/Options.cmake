# Compiler options. Binaries are portable: the baseline is x86-64-v2 and hot loops pick AVX2 or AVX-512 at run
# time (nn/core/simd.h), with bit-equal results, which is why floating-point contraction is off everywhere.
add_library(topknot_options INTERFACE)
# GCC 12's -Wrestrict warns of std::string's own code, its -Wstringop-overflow of fmt 9's.
target_compile_options(topknot_options INTERFACE
                       $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -ffp-contract=off -Wno-psabi -Wno-restrict
                       -Wno-stringop-overflow>)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  target_compile_options(topknot_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=x86-64-v2>)
endif()
target_include_directories(topknot_options INTERFACE ${CMAKE_SOURCE_DIR})
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -g1")

# A debug build compares operation, number and size of every collective across the ranks.
target_compile_definitions(topknot_options INTERFACE $<$<CONFIG:Debug>:TOPKNOT_CHECK_CALLS>)

option(TOPKNOT_POISON "Fill memory with NaNs wherever it is allocated or used again, so that what reads it too early is found" OFF)
if(TOPKNOT_POISON)
  target_compile_definitions(topknot_options INTERFACE TOPKNOT_POISON)
endif()

option(TOPKNOT_UNITY "Compile the sources of a folder as one: a whole build is quicker, a changed file's slower" OFF)
if(TOPKNOT_UNITY)
  # GCC takes a unit's sources for headers, where types of anonymous namespaces would be a mistake.
  target_compile_options(topknot_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
endif()

if(TOPKNOT_ASAN)
  target_compile_options(topknot_options INTERFACE
                         $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined -fno-omit-frame-pointer>)
  target_link_options(topknot_options INTERFACE -fsanitize=address,undefined)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    # libFuzzer without its main(), for tests/fuzz/inputs.
    foreach(name libclang_rt.fuzzer_no_main-${CMAKE_SYSTEM_PROCESSOR}.a libclang_rt.fuzzer_no_main.a)
      execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${name} OUTPUT_VARIABLE path
                      OUTPUT_STRIP_TRAILING_WHITESPACE)
      if(EXISTS "${path}")
        set(TOPKNOT_LIBFUZZER ${path})
        target_compile_options(topknot_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
      endif()
    endforeach()
  endif()
endif()
if(TOPKNOT_TSAN)
  # Function multiversioning needs resolvers that run before the sanitizer is ready.
  target_compile_options(topknot_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=thread>)
  target_compile_definitions(topknot_options INTERFACE TOPKNOT_SINGLE_VERSION)
  target_link_options(topknot_options INTERFACE -fsanitize=thread)
endif()
