# ESPALIER_FAULTS: a build whose library has every deliberate fault of tests/mutation/faults.py in it, each switched on by the
# environment variable ESPALIER_FAULT (tests/mutation/fault_of_environment.cpp). tools/faults_by_tier.py asks it which tests
# notice which fault.
option(ESPALIER_FAULTS "Build the library with deliberate faults, to be switched on by a variable" OFF)
set(ESPALIER_FAULTY_FILES "")
if(ESPALIER_FAULTS)
  set(write "${ESPALIER_PYTHON}" "${PROJECT_SOURCE_DIR}/tests/mutation/write_faulty_sources.py" "${PROJECT_SOURCE_DIR}/espalier")
  set(ESPALIER_FAULTY_FOLDER "${CMAKE_BINARY_DIR}/faulty")
  execute_process(COMMAND ${write} --list OUTPUT_VARIABLE ESPALIER_FAULTY_FILES COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${write} "${ESPALIER_FAULTY_FOLDER}" COMMAND_ERROR_IS_FATAL ANY)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/mutation/faults.py")
endif()

# Names the copies in place of those files of the variable `files` that have faults.
function(espalier_take_faulty_files files)
  set(taken "")
  foreach(file ${${files}})
    if(file IN_LIST ESPALIER_FAULTY_FILES)
      set(file "${ESPALIER_FAULTY_FOLDER}/${file}")
      set_source_files_properties("${file}" PROPERTIES COMPILE_OPTIONS "-Wno-misleading-indentation;-Wno-unused-value")
    endif()
    list(APPEND taken "${file}")
  endforeach()
  set(${files} "${taken}" PARENT_SCOPE)
endfunction()
