/* What this process tells about itself: which groups it has, and a thread that answers on a socket. */
#pragma once

#include "engine/activity.h"
#include "engine/engine.h"

/* With the group: nobody reads of it any more. */
void mpp_forget_activity(mpp_group *group);
