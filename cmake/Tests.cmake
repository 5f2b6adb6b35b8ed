# topknot_test(FOLDER LIBRARIES...): the test program of a folder next to the CMakeLists.txt that calls; ctest runs each case
# by itself. A case is named after what it shows.
find_package(Catch2 REQUIRED)
include(Catch)

add_library(test_main OBJECT ${CMAKE_SOURCE_DIR}/tests/support/main.cpp)
if(TARGET Catch2::Catch2WithMain)
  target_link_libraries(test_main PUBLIC Catch2::Catch2WithMain)
else()
  target_link_libraries(test_main PUBLIC Catch2::Catch2)
endif()
target_link_libraries(test_main PUBLIC topknot_options)
# Half of a build is tests, and much of their compilation is optimisation, which -O1 shortens. The bits are the same.
set(topknot_test_options $<$<NOT:$<CONFIG:Debug>>:-O1>)
target_compile_options(test_main PUBLIC ${topknot_test_options})

# Far beyond what a test takes: one that hangs ends. Sanitizers make the longest ten times as long.
set(topknot_test_seconds 300)
if(TOPKNOT_ASAN OR TOPKNOT_TSAN)
  set(topknot_test_seconds 3000)
endif()

function(topknot_test folder)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.cpp)
  if(NOT sources)
    return()
  endif()
  topknot_executable(test_${folder} "${sources}" ${ARGN})
  topknot_unity(test_${folder} ${sources})
  target_link_libraries(test_${folder} PRIVATE test_main)
  catch_discover_tests(test_${folder} TEST_PREFIX "${folder}: " PROPERTIES TIMEOUT ${topknot_test_seconds}
                       SKIP_REGULAR_EXPRESSION "skipped: ")  # a test says so where it cannot run
endfunction()
