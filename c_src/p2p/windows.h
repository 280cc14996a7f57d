/* What the end of a group asks of its windows. */
#pragma once

#include "engine/engine.h"

/* Whether a window is open yet, or a message under way; else nothing comes any more. */
int mpp_windows_end(mpp_group *group);
