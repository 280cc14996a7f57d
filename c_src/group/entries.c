#include "group/entries.h"

#define MPP_ENTRY(name, ...) .name = mpp_##name,
static const mpp_entries entries = {.size = sizeof entries,
#define MPP_OPERATION MPP_ENTRY
#include "ops.def"
                                    MPP_ENTRIES(MPP_ENTRY)};

uintptr_t mpp_entries_address(void) { return (uintptr_t)&entries; }
